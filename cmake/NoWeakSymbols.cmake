# cmake -DNM=nm -DOBJECT=x.o -P NoWeakSymbols.cmake: fails if the object defines
# a symbol that the linker may take for another object's (see CpuLevels.cmake).
execute_process(COMMAND ${NM} --defined-only ${OBJECT}
  OUTPUT_VARIABLE symbols RESULT_VARIABLE failed)
if(failed OR symbols STREQUAL "")
  message(FATAL_ERROR "${NM} lists nothing in ${OBJECT}")
endif()
string(REGEX MATCHALL "[^\n]* [WwVvu] [^\n]*" weak "${symbols}")
if(weak)
  list(JOIN weak "\n  " weak)
  message(FATAL_ERROR "weak symbols in ${OBJECT}:\n  ${weak}")
endif()
