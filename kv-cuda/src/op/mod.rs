//! The operations: parameters and launch of each kernel.
pub(crate) mod attend;
pub(crate) mod convert;
pub(crate) mod copy;
pub(crate) mod gather;
mod lanes;
mod pad;
pub(crate) mod write;

/// The reason for which a kernel does not take a call, so that a slower one does. One function of
/// each family returns the choice among its faster kernels or this: [`crate::decode::Shape::of`],
/// `attend::launches::Prefill::of`, [`write::in_lanes`], [`gather::values`].
pub(crate) type Refusal = &'static str;

/// Rounds up to 16 bytes, the granularity of shared memory in kernels; `u32::MAX`, which no device
/// has, if more.
fn round16(bytes: u32) -> u32 {
    bytes.checked_next_multiple_of(16).unwrap_or(u32::MAX)
}

/// Returns the largest `head_dim` of K and of V whose rows fit a thread block's shared memory in
/// the general kernels; launches beyond it would fail.
pub(crate) fn head_dim_max(shared_bytes_max: u32) -> u32 {
    attend::head_dim_max(shared_bytes_max).min(write::head_dim_max(shared_bytes_max))
}

/// Maximum blocks along y and z on every device; kernels loop over the rest.
const MAX_YZ: u32 = 65_535;

/// Returns the blocks of four warps for this many warps, at most the limit of every device along x:
/// kernels loop over the rest.
fn warps4(warps: u64) -> u32 {
    u32::try_from(warps.div_ceil(4)).unwrap_or(u32::MAX).min(1 << 30)
}
