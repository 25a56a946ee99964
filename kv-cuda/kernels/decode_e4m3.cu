// Decoding: K and V in e4m3 with a given scale, queries in f16 or bf16.
#include "decode.h"
KV_DECODE_KERNELS(decode_e4m3, KvDecodeCodes<KvCodeE4m3>)
