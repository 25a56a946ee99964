// Decoding: K and V in int8 with a given scale, queries in f16 or bf16.
#include "decode.h"
KV_DECODE_KERNELS(decode_int8, KvDecodeCodes<KvCodeInt8>)
