# NLOHMANN_JSON_INCLUDE: of the Python package nlohmann-json, which is nothing but
# the headers, or of the system (Debian: nlohmann-json3-dev).
find_package(Python3 3.11 COMPONENTS Interpreter)
if(Python3_Interpreter_FOUND)
  execute_process(
    COMMAND ${Python3_EXECUTABLE} -c
      "import os, importlib.util as u; print(os.path.dirname(u.find_spec('nlohmann_json').origin))"
    OUTPUT_VARIABLE json_package OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
endif()
find_path(NLOHMANN_JSON_INCLUDE nlohmann/json.hpp HINTS ${json_package}/include)
if(NOT NLOHMANN_JSON_INCLUDE)
  message(FATAL_ERROR "nlohmann/json.hpp is missing: pip install nlohmann-json, "
    "and build with --no-build-isolation")
endif()
