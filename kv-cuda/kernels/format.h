// What the bytes of a stored row mean: kv-quant's row.rs, on the device.
#pragma once
#include "rows.h"
