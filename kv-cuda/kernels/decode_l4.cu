// Decoding: K and V in l4, queries in f16 or bf16. A group of 16 codes, which 80 values end with, is another kernel's.
#include "decode.h"
KV_DECODE(decode_l4_64, KvDecodeRowCodes<KvRowL4>, 64)
KV_DECODE(decode_l4_96, KvDecodeRowCodes<KvRowL4>, 96)
KV_DECODE(decode_l4_128, KvDecodeRowCodes<KvRowL4>, 128)
KV_DECODE(decode_l4_192, KvDecodeRowCodes<KvRowL4>, 192)
KV_DECODE(decode_l4_256, KvDecodeRowCodes<KvRowL4>, 256)
