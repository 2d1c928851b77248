#define BN_BF16 1
#define BN_AMX 0
#include "isa.inc"

namespace bertopt_native {
const Kernel NEON_I8MM{"neon_i8mm", sizeof(Quantised), ELEMENT, 48, run_group, int8_product, float_linear};
}
