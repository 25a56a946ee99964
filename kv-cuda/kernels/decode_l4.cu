// Decode kernels: K and V in l4, queries in f16 or bf16. Rows of 80 values, which end with a group
// of 16 codes, are left to the general kernel.
#include "decode.h"
KV_DECODE(decode_l4_64, KvDecodeRowCodes<KvRowL4>, 64)
KV_DECODE(decode_l4_96, KvDecodeRowCodes<KvRowL4>, 96)
KV_DECODE(decode_l4_128, KvDecodeRowCodes<KvRowL4>, 128)
KV_DECODE(decode_l4_192, KvDecodeRowCodes<KvRowL4>, 192)
KV_DECODE(decode_l4_256, KvDecodeRowCodes<KvRowL4>, 256)
