//! The operations of the contract, one file each.
pub(crate) mod attend;
pub(crate) mod bytes;
pub(crate) mod convert;
pub(crate) mod copy;
pub(crate) mod gather;
pub(crate) mod pad;
mod tail;
pub(crate) mod write;

/// Lists every kernel in every specialisation, for the tests that validate them.
#[cfg(test)]
pub(crate) fn kernels() -> Vec<crate::pipelines::Kernel> {
    [attend::kernels(), bytes::kernels(), convert::kernels(), copy::kernels(), gather::kernels()]
        .into_iter()
        .chain([pad::kernels(), write::kernels()])
        .flatten()
        .collect()
}
