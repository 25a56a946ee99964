// Decode kernels: K and V in int8 with a calibrated scale, queries in f16 or bf16.
#include "decode.h"
KV_DECODE(decode_int8_64, KvDecodeCodes<KvCodeInt8>, 64)
KV_DECODE(decode_int8_80, KvDecodeCodes<KvCodeInt8>, 80)
KV_DECODE(decode_int8_96, KvDecodeCodes<KvCodeInt8>, 96)
KV_DECODE(decode_int8_128, KvDecodeCodes<KvCodeInt8>, 128)
KV_DECODE(decode_int8_192, KvDecodeCodes<KvCodeInt8>, 192)
KV_DECODE(decode_int8_256, KvDecodeCodes<KvCodeInt8>, 256)
