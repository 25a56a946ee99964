// Decoding: K and V in e5m2 with a given scale, queries in f16 or bf16.
#include "decode.h"
KV_DECODE_KERNELS(decode_e5m2, KvDecodeCodes<KvCodeE5m2>)
