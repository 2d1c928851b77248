#define BN_AVX512 1
#define BN_BF16 1
#define BN_AMX 0
#include "isa.inc"

namespace bertopt_native {
const Kernel AVX512_BF16{"avx512_bf16", sizeof(Quantised), ELEMENT, 48, run_group, int8_product, float_linear};
}
