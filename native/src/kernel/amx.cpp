#define BN_BF16 1
#define BN_AMX 1
#include "isa.inc"

namespace bertopt_native {
const Kernel AMX{"amx", ELEMENT, ELEMENT, 64, run_group, int8_product, float_linear};
}
