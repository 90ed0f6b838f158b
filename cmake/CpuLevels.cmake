# memscale_cpu_levels(<target> <source>): compiles the source once for each level
# of x86-64 (v2: SSE4.2, v3: AVX2, v4: AVX-512), or once plainly on other CPUs,
# with MEMSCALE_CPU_LEVEL defined as the level's name, and adds the objects to
# the target. MEMSCALE_CPU_LEVELS is the list of levels, the object library of
# each is <target>_<level>.
#
# The flags of a level are on its object and nowhere else, and such an object
# may hold no weak symbol: the linker could pick it for code that runs on every
# CPU. The tests cpu_level_*_has_no_weak_symbols hold this.
if(CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|AMD64)$")
  set(MEMSCALE_CPU_LEVELS v2 v3 v4)
  set(MEMSCALE_CPU_DISPATCH x86)
else()
  set(MEMSCALE_CPU_LEVELS portable)
  set(MEMSCALE_CPU_DISPATCH portable)
endif()

function(memscale_cpu_levels target source)
  foreach(level IN LISTS MEMSCALE_CPU_LEVELS)
    set(object ${target}_${level})
    add_library(${object} OBJECT ${source})
    target_include_directories(${object} PRIVATE ${PROJECT_SOURCE_DIR}/src)
    target_link_libraries(${object} PRIVATE memscale::warnings)
    target_compile_definitions(${object} PRIVATE MEMSCALE_CPU_LEVEL=${level})
    # Tables inside vector registers need permutations of floats: from AVX2 on,
    # as GCC spells them.
    set(loops scalars)
    if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND level MATCHES "v3|v4")
      set(loops vectors)
      set(lanes 8)
      if(level STREQUAL "v4")
        set(lanes 16)
      endif()
      target_compile_definitions(${object} PRIVATE MEMSCALE_LANES=${lanes})
    endif()
    target_compile_definitions(${object} PRIVATE
      MEMSCALE_CODEC_LOOPS="memscale/kernels/cpu/codec_${loops}.h")
    # Nothing here changes a result: no fused multiply-adds, and neither errno
    # nor floating-point traps, which stand in the vectorizer's way.
    target_compile_options(${object} PRIVATE -O3 -ffp-contract=off
      -fno-math-errno -fno-trapping-math
      $<$<STREQUAL:${MEMSCALE_CPU_DISPATCH},x86>:-march=x86-64-${level}>)
    target_sources(${target} PRIVATE $<TARGET_OBJECTS:${object}>)
  endforeach()
endfunction()
