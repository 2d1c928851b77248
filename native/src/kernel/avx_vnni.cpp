#define BN_AVX512 0
#define BN_BF16 0
#define BN_AMX 0
#define BN_AVX_VNNI 1
#include "isa.inc"

namespace bertopt_native {
const Kernel AVX_VNNI{"avx_vnni", sizeof(Quantised), ELEMENT, 48, run_group, int8_product, float_linear};
}
