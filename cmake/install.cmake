# `cmake --install <build> --prefix dist` gives a relocatable folder: bin/ with the programs and the launcher
# megatron-run, lib/ with libmegatron_compute.so and every shared library that is neither libtorch, CUDA, cuDNN, NCCL nor
# glibc.
# With MEGATRON_INSTALL_LIBRARY it also gives what find_package(megatron) needs: static libraries, headers, CMake files.
include(GNUInstallDirs)
include(CMakePackageConfigHelpers)

set(programs)
foreach(target megatron gpu_tests kernel_bench)
  if(TARGET ${target})
    list(APPEND programs ${target})
    set_target_properties(${target} PROPERTIES INSTALL_RPATH "$ORIGIN/../lib")
  endif()
endforeach()
foreach(target megatron_compute megatron_media)
  if(TARGET ${target})
    list(APPEND programs ${target})
    set_target_properties(${target} PROPERTIES INSTALL_RPATH "$ORIGIN")
  endif()
endforeach()
# RPATH in place of RUNPATH, which does not count for what copied libraries need: OpenSSL of Debian 13 needs zlib and zstd.
foreach(target ${programs})
  target_link_options(${target} PRIVATE LINKER:--disable-new-dtags)
endforeach()
if(programs)
  install(CODE "set(CMAKE_INSTALL_DO_STRIP TRUE)" COMPONENT runtime)
  install(TARGETS ${programs} RUNTIME_DEPENDENCY_SET runtime_libraries
    RUNTIME DESTINATION bin COMPONENT runtime LIBRARY DESTINATION lib COMPONENT runtime)
  # What the machine or the torch wheel provides is neither followed nor copied.
  install(RUNTIME_DEPENDENCY_SET runtime_libraries
    PRE_EXCLUDE_REGEXES "^lib(torch|c10|shm|caffe2)" "^lib(cu|nv|nccl)" "^ld-linux"
      "^lib(c|m|dl|rt|pthread|util|resolv|anl|nsl|mvec)\\.so"
    POST_EXCLUDE_REGEXES "/torch/lib/" "/nvidia/"
    DIRECTORIES ${MEGATRON_TORCH_DIR}/lib
    LIBRARY DESTINATION lib COMPONENT runtime)
  if(TARGET megatron_parquet)  # loaded on demand; Arrow itself stays in the pyarrow wheel
    set_target_properties(megatron_parquet PROPERTIES INSTALL_RPATH "$ORIGIN")
    install(TARGETS megatron_parquet LIBRARY DESTINATION lib COMPONENT runtime)
  endif()
  if(TARGET megatron_faiss)  # loaded on demand
    install(TARGETS megatron_faiss LIBRARY DESTINATION lib COMPONENT runtime)
  endif()
  configure_file(${CMAKE_CURRENT_LIST_DIR}/megatron-run.sh.in ${CMAKE_BINARY_DIR}/megatron-run @ONLY)
  install(PROGRAMS ${CMAKE_BINARY_DIR}/megatron-run DESTINATION bin COMPONENT runtime)
  install(FILES ${PROJECT_SOURCE_DIR}/LICENSE DESTINATION share/doc/megatron COMPONENT runtime)
endif()

if(MEGATRON_INSTALL_LIBRARY)
  set_target_properties(megatron_library PROPERTIES EXPORT_NAME megatron)
  set(config_dir ${CMAKE_INSTALL_LIBDIR}/cmake/megatron)
  install(TARGETS megatron_library ${libraries} EXPORT megatron-targets
    ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR}/megatron COMPONENT library)
  install(EXPORT megatron-targets NAMESPACE megatron:: DESTINATION ${config_dir} COMPONENT library)
  install(DIRECTORY ${PROJECT_SOURCE_DIR}/megatron DESTINATION include COMPONENT library
    FILES_MATCHING PATTERN "*.h")
  configure_package_config_file(${CMAKE_CURRENT_LIST_DIR}/megatron-config.cmake.in
    ${CMAKE_BINARY_DIR}/megatron-config.cmake INSTALL_DESTINATION ${config_dir})
  write_basic_package_version_file(${CMAKE_BINARY_DIR}/megatron-config-version.cmake COMPATIBILITY SameMinorVersion)
  install(FILES ${CMAKE_BINARY_DIR}/megatron-config.cmake ${CMAKE_BINARY_DIR}/megatron-config-version.cmake
    DESTINATION ${config_dir} COMPONENT library)
  install(FILES ${CMAKE_CURRENT_LIST_DIR}/dependencies.cmake DESTINATION ${config_dir}
    RENAME megatron-dependencies.cmake COMPONENT library)
endif()
