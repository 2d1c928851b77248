#define BN_BF16 0
#define BN_AMX 0
#include "isa.inc"

namespace bertopt_native {
const Kernel NEON_DOTPROD{"neon_dotprod", sizeof(Quantised), ELEMENT, 48, run_group, int8_product, float_linear};
}
