//! The operations: what each kernel is given and how it is started.
pub(crate) mod attend;
pub(crate) mod convert;
pub(crate) mod copy;
pub(crate) mod gather;
mod pad;
pub(crate) mod write;

/// Shared memory is handed out in pieces of 16 bytes.
fn round16(bytes: u32) -> u32 {
    bytes.checked_next_multiple_of(16).unwrap_or(u32::MAX)
}

/// Largest `head_dim` of K and of V whose rows fit the shared memory of a thread block in the
/// kernels that take any; beyond it their launch would fail.
pub(crate) fn head_dim_max(shared_bytes_max: u32) -> u32 {
    attend::head_dim_max(shared_bytes_max).min(write::head_dim_max(shared_bytes_max))
}

/// Blocks along y and z that every device takes; kernels that may want more go on with the next.
const MAX_YZ: u32 = 65_535;

/// Blocks of four warps for one warp a unit. No more than every device takes along x: kernels go on
/// with the next unit where there are more.
fn warps4(units: u64) -> u32 {
    u32::try_from(units.div_ceil(4)).unwrap_or(u32::MAX).min(1 << 30)
}
