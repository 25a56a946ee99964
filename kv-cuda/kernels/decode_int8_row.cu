// Decode kernels: K and V in int8 with a scale per row, queries in f16 or bf16.
#include "decode.h"
KV_DECODE(decode_int8_row_64, KvDecodeRowCodes<KvRowInt8>, 64)
KV_DECODE(decode_int8_row_80, KvDecodeRowCodes<KvRowInt8>, 80)
KV_DECODE(decode_int8_row_96, KvDecodeRowCodes<KvRowInt8>, 96)
KV_DECODE(decode_int8_row_128, KvDecodeRowCodes<KvRowInt8>, 128)
KV_DECODE(decode_int8_row_192, KvDecodeRowCodes<KvRowInt8>, 192)
KV_DECODE(decode_int8_row_256, KvDecodeRowCodes<KvRowInt8>, 256)
