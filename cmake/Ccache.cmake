# ccache when present. The sloppiness lets it cache through precompiled headers.
find_program(MEMSCALE_CCACHE ccache)
if(MEMSCALE_CCACHE AND NOT CMAKE_CXX_COMPILER_LAUNCHER)
  set(CMAKE_CXX_COMPILER_LAUNCHER
      ${CMAKE_COMMAND} -E env CCACHE_SLOPPINESS=pch_defines,time_macros
      ${MEMSCALE_CCACHE})
endif()
