#define BN_AVX512 1
#define BN_BF16 1
#define BN_AMX 1
#include "isa.inc"

namespace bertopt_native {
const Kernel AMX{"amx", sizeof(Quantised), ELEMENT, 384, run_group, int8_product, float_linear};
}
