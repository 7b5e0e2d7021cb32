#!/bin/sh
# Create the environment of one peer: install.sh NAME DIRECTORY [PYTHON]. Nothing is done when it is already complete.
set -eu
name=$1 dir=$2 python=${3:-python3}
case $name in
gptqmodel) packages="gptqmodel==7.6.0 bitsandbytes==0.50.2" ;;
llmcompressor) packages="llmcompressor==0.14.0.1" ;;
llamacpp) packages="llama-cpp-python==0.3.36 scipy-openblas32==0.3.34.481.3" ;; # compiled: needs g++
*) echo "unknown peer $name: gptqmodel, llmcompressor or llamacpp" >&2; exit 2 ;;
esac
[ -e "$dir/complete" ] && exit 0
"$python" -m venv "$dir"
# They build against the torch they find, so it comes first; both want other numpy and transformers than we do.
[ "$name" = llamacpp ] || "$dir/bin/pip" install -q torch==2.13.0
# shellcheck disable=SC2086
"$dir/bin/pip" install -q $packages
if [ "$name" = llamacpp ]; then # its BLAS backend is one file; it alone multiplies without rounding activations
    "$dir/bin/pip" download -q --no-deps --no-binary :all: -d "$dir/src" llama-cpp-python==0.3.36
    tar -xzf "$dir"/src/llama_cpp_python-0.3.36.tar.gz -C "$dir/src"
    ggml=$dir/src/llama_cpp_python-0.3.36/vendor/llama.cpp/ggml
    packages=$("$dir/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    lib=$packages/llama_cpp/lib blas=$packages/scipy_openblas32
    g++ -O2 -std=c++17 -shared -fPIC -DGGML_BACKEND_DL -DGGML_BACKEND_BUILD -DGGML_BACKEND_SHARED -DGGML_SHARED \
        -Dcblas_sgemm=scipy_cblas_sgemm -I"$blas/include" -I"$ggml/include" -I"$ggml/src" \
        "$ggml/src/ggml-blas/ggml-blas.cpp" -o "$lib/libggml-blas.so" -L"$lib" -lggml-base -L"$blas/lib" \
        -lscipy_openblas -Wl,-rpath,'$ORIGIN' -Wl,-rpath,"$blas/lib"
fi
touch "$dir/complete"
