# memscale::torch and memscale::torch_python, with no more flags than needed.
# The torch package is asked of the active Python: it is the one that the
# modules will be loaded beside, and a build is bound to its minor version.
find_package(Python3 3.11 REQUIRED COMPONENTS Interpreter Development.Module)
execute_process(
  COMMAND ${Python3_EXECUTABLE} -c
    "import os, importlib.util as u; print(os.path.dirname(u.find_spec('torch').origin))"
  OUTPUT_VARIABLE MEMSCALE_TORCH_DIR OUTPUT_STRIP_TRAILING_WHITESPACE
  RESULT_VARIABLE torch_missing ERROR_QUIET)
if(torch_missing)
  message(FATAL_ERROR "no torch in ${Python3_EXECUTABLE}: pip install torch==2.13.0, "
    "and build with --no-build-isolation")
endif()
file(STRINGS ${MEMSCALE_TORCH_DIR}/version.py torch_version_line REGEX "^__version__")
if(NOT torch_version_line MATCHES "'(2\\.13\\.[0-9]+)")
  message(FATAL_ERROR "MemScale is bound to torch 2.13.*, found: ${torch_version_line}")
endif()
set(MEMSCALE_TORCH_VERSION ${CMAKE_MATCH_1})
message(STATUS "torch ${MEMSCALE_TORCH_VERSION} in ${MEMSCALE_TORCH_DIR}")

add_library(memscale_torch INTERFACE)
add_library(memscale::torch ALIAS memscale_torch)
# SYSTEM: torch's headers do not answer to our warnings.
target_include_directories(memscale_torch SYSTEM INTERFACE
  ${MEMSCALE_TORCH_DIR}/include
  ${MEMSCALE_TORCH_DIR}/include/torch/csrc/api/include)
target_link_directories(memscale_torch INTERFACE ${MEMSCALE_TORCH_DIR}/lib)
target_link_libraries(memscale_torch INTERFACE torch torch_cpu c10)
# NDEBUG: RecordFunction's layout and asserts depend on it, and torch's wheels
# are built with it. It holds in every build type of ours.
# AT_PER_OPERATOR_HEADERS: include single operators, never all of them.
target_compile_definitions(memscale_torch INTERFACE NDEBUG AT_PER_OPERATOR_HEADERS)

add_library(memscale_torch_python INTERFACE)
add_library(memscale::torch_python ALIAS memscale_torch_python)
target_link_libraries(memscale_torch_python INTERFACE
  memscale::torch torch_python Python3::Module)
