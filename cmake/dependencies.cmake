# Libraries from the distribution, libtorch from the PyPI wheel, CUDA from its toolkit. The installed package uses this
# file too (cmake/megatron-config.cmake.in), so it defines imported targets only.
find_package(PkgConfig REQUIRED)
find_package(Threads REQUIRED)
find_package(ZLIB REQUIRED)
find_package(nlohmann_json REQUIRED)
pkg_check_modules(ZSTD REQUIRED IMPORTED_TARGET libzstd)
pkg_check_modules(PCRE2 REQUIRED IMPORTED_TARGET libpcre2-8)
pkg_check_modules(XXHASH REQUIRED IMPORTED_TARGET libxxhash)
pkg_check_modules(UTF8PROC REQUIRED IMPORTED_TARGET libutf8proc)
pkg_check_modules(YAMLCPP REQUIRED IMPORTED_TARGET yaml-cpp)
pkg_check_modules(SIMDJSON IMPORTED_TARGET simdjson)
if(NOT TARGET PkgConfig::SIMDJSON)  # Ubuntu 22.04 packages it without a .pc file
  find_package(simdjson REQUIRED)
  set(SIMDJSON_VERSION ${simdjson_VERSION})
  add_library(PkgConfig::SIMDJSON INTERFACE IMPORTED)
  target_link_libraries(PkgConfig::SIMDJSON INTERFACE simdjson::simdjson)
  # g++ 12 takes lifetimes inside this version's header (1.0) for dangling ones.
  target_compile_options(PkgConfig::SIMDJSON INTERFACE -Wno-dangling-pointer -Wno-maybe-uninitialized)
endif()
find_package(OpenSSL 3.0 REQUIRED)
# Headers alone, and those of Beast and Asio: no compiled library of Boost is used.
find_path(MEGATRON_BOOST_INCLUDE boost/beast/version.hpp)
if(NOT MEGATRON_BOOST_INCLUDE)
  message(FATAL_ERROR "the headers of Boost are missing: run `make setup`, or give -DMEGATRON_BOOST_INCLUDE=<folder>")
endif()
add_library(boost_headers INTERFACE IMPORTED GLOBAL)
target_include_directories(boost_headers SYSTEM INTERFACE ${MEGATRON_BOOST_INCLUDE})
if(MEGATRON_TESTS)
  find_package(GTest REQUIRED)
endif()

# libtorch: the unpacked wheel.
set(MEGATRON_TORCH_VERSION 2.11.0)
if(MEGATRON_TORCH)
  set(MEGATRON_TORCH_DIR "" CACHE PATH "folder of the torch package (site-packages/torch)")
  if(NOT EXISTS "${MEGATRON_TORCH_DIR}/version.py")
    file(GLOB candidates ${CMAKE_CURRENT_SOURCE_DIR}/.venv/lib/python3*/site-packages/torch)
    if(MEGATRON_TORCH_DIR OR NOT candidates)
      message(FATAL_ERROR "libtorch not found at \"${MEGATRON_TORCH_DIR}\": run `make setup`, "
                          "or give -DMEGATRON_TORCH_DIR=<site-packages>/torch")
    endif()
    list(GET candidates 0 MEGATRON_TORCH_DIR)
  endif()
  file(STRINGS ${MEGATRON_TORCH_DIR}/version.py found REGEX "^__version__")
  if(NOT found MATCHES "'${MEGATRON_TORCH_VERSION}[+']")
    message(FATAL_ERROR "${MEGATRON_TORCH_DIR} holds torch ${found}; expected ${MEGATRON_TORCH_VERSION}")
  endif()
  set(MEGATRON_SITE_PACKAGES ${MEGATRON_TORCH_DIR}/..)
  cmake_path(NORMAL_PATH MEGATRON_SITE_PACKAGES)
  file(GLOB MEGATRON_NVIDIA_LIB_DIRS ${MEGATRON_SITE_PACKAGES}/nvidia/*/lib)

  add_library(torch_headers INTERFACE IMPORTED GLOBAL)
  target_include_directories(torch_headers SYSTEM INTERFACE
    ${MEGATRON_TORCH_DIR}/include ${MEGATRON_TORCH_DIR}/include/torch/csrc/api/include)
  target_compile_definitions(torch_headers INTERFACE _GLIBCXX_USE_CXX11_ABI=1)
  add_library(libtorch INTERFACE IMPORTED GLOBAL)
  target_link_libraries(libtorch INTERFACE torch_headers
    ${MEGATRON_TORCH_DIR}/lib/libtorch_cpu.so ${MEGATRON_TORCH_DIR}/lib/libc10.so ${MEGATRON_TORCH_DIR}/lib/libgomp.so.1)
  # The libraries that libtorch itself loads are found through its own run path.
  target_link_options(libtorch INTERFACE LINKER:--allow-shlib-undefined)
  # Run path of what is built here; an installed program has its own (cmake/install.cmake).
  set(CMAKE_BUILD_RPATH ${MEGATRON_TORCH_DIR}/lib ${MEGATRON_NVIDIA_LIB_DIRS})
endif()

if(MEGATRON_CUDA)
  set(CMAKE_CUDA_ARCHITECTURES "80;90a;100" CACHE STRING "CUDA architectures (90a alone is enough for development on Hopper)")
  if(NOT CMAKE_CUDA_COMPILER AND NOT DEFINED ENV{CUDACXX} AND EXISTS /usr/local/cuda/bin/nvcc)
    set(CMAKE_CUDA_COMPILER /usr/local/cuda/bin/nvcc)
  endif()
  enable_language(CUDA)
  set(CMAKE_CUDA_STANDARD 20)
  set(CMAKE_CUDA_EXTENSIONS OFF)
  if(NOT CMAKE_CUDA20_STANDARD_COMPILE_OPTION)  # CMake 3.25.1 does not know that nvcc has it
    set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION -std=c++20)
    set(CMAKE_CUDA20_EXTENSION_COMPILE_OPTION -std=c++20)
  endif()
  find_package(CUDAToolkit 13 REQUIRED)
  if(MEGATRON_TORCH)
    target_link_libraries(libtorch INTERFACE -Wl,--no-as-needed ${MEGATRON_TORCH_DIR}/lib/libtorch_cuda.so
      ${MEGATRON_TORCH_DIR}/lib/libc10_cuda.so -Wl,--as-needed CUDA::cudart CUDA::cublasLt CUDA::nvtx3)
    # Headers alone: the library is the one that libtorch loads.
    find_path(MEGATRON_CUDNN_INCLUDE cudnn.h
      HINTS ${MEGATRON_SITE_PACKAGES}/nvidia/cudnn/include ${CUDAToolkit_INCLUDE_DIRS} NO_CMAKE_FIND_ROOT_PATH)
    find_path(MEGATRON_CUDNN_FRONTEND_INCLUDE cudnn_frontend.h HINTS ${MEGATRON_SITE_PACKAGES}/include)
    if(NOT MEGATRON_CUDNN_INCLUDE OR NOT MEGATRON_CUDNN_FRONTEND_INCLUDE)
      message(FATAL_ERROR "the headers of cuDNN (${MEGATRON_CUDNN_INCLUDE}) or of its frontend "
                          "(${MEGATRON_CUDNN_FRONTEND_INCLUDE}) are missing: run `make setup`")
    endif()
    add_library(cudnn_frontend INTERFACE IMPORTED GLOBAL)
    target_include_directories(cudnn_frontend SYSTEM INTERFACE ${MEGATRON_CUDNN_FRONTEND_INCLUDE} ${MEGATRON_CUDNN_INCLUDE})
  endif()
  # Headers alone. The wheel keeps them below its own folder.
  find_path(MEGATRON_CUTLASS_INCLUDE cutlass/cutlass.h
    HINTS ${MEGATRON_SITE_PACKAGES}/cutlass_library/source/include NO_CMAKE_FIND_ROOT_PATH)
  if(NOT MEGATRON_CUTLASS_INCLUDE)
    message(FATAL_ERROR "the headers of CUTLASS are missing: run `make setup`, "
                        "or give -DMEGATRON_CUTLASS_INCLUDE=<cutlass>/include")
  endif()
  add_library(cutlass INTERFACE IMPORTED GLOBAL)
  target_include_directories(cutlass SYSTEM INTERFACE ${MEGATRON_CUTLASS_INCLUDE})
endif()
