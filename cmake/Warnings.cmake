# memscale::warnings: one warning set for every target of ours.
add_library(memscale_warnings INTERFACE)
add_library(memscale::warnings ALIAS memscale_warnings)
target_compile_options(memscale_warnings INTERFACE
  -Wall -Wextra -Wpedantic -Wshadow -Wnon-virtual-dtor -Woverloaded-virtual
  -Wconversion -Wno-sign-conversion
  $<$<BOOL:${MEMSCALE_WERROR}>:-Werror>)
