//! The identity of chunks: model, adapter and tenant, on which their bytes depend besides tokens.
//! The caller provides it, without a default, and the name of every chunk includes it.
mod digest;
mod root;
#[cfg(test)]
mod tests;

pub use digest::{DigestError, ModelDigest};
pub use root::ChunkRoot;

use std::collections::BTreeMap;
use std::fmt;

use crate::chunk::ChunkSpec;

/// The model, its adapters, and everything else that separates chunks of one model.
///
/// There is no default and no model by name: other weights, another quantisation of them or another
/// adapter under the same number never find each other's chunks.
///
/// ```
/// use kv::{CacheSpec, GroupId};
/// use kv::tier::{ChunkSpec, Identity, ModelDigest};
///
/// let spec = CacheSpec::builder().layers(2).kv_heads(2).head_dim(64).paged(16, 64).build()?;
/// let chunks = ChunkSpec::new(&spec, GroupId(0))?;
/// let identity = Identity::new(ModelDigest::of_bytes(b"weights"));
/// let root = identity.root(&chunks, 7, b"tenant 1", None)?;
/// assert_ne!(root.name(), identity.root(&chunks, 7, b"tenant 2", None)?.name());
/// assert!(identity.root(&chunks, 7, b"", Some(3)).is_err(), "adapter 3 has no digest");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone)]
pub struct Identity {
    model: ModelDigest,
    adapters: BTreeMap<u64, ModelDigest>,
    numerics: Option<Box<str>>,
    tenant_key: Option<[u8; 32]>,
}

impl Identity {
    /// Creates the identity of a model without adapters.
    pub fn new(model: ModelDigest) -> Self {
        Self { model, adapters: BTreeMap::new(), numerics: None, tenant_key: None }
    }

    /// Sets the digest of the adapter that this process calls `number`
    /// ([`StartOptions::with_adapter`](kv_core::StartOptions::with_adapter)). The number itself is
    /// in no name, so processes may number adapters differently.
    #[must_use]
    pub fn with_adapter(mut self, number: u64, digest: ModelDigest) -> Self {
        self.adapters.insert(number, digest);
        self
    }

    /// Separates devices whose results differ in the last bits, such as `cuda-sm90`. Unset, chunks
    /// are shared by all devices.
    #[must_use]
    pub fn with_numerics(mut self, name: impl Into<Box<str>>) -> Self {
        self.numerics = Some(name.into());
        self
    }

    /// Sets a secret that keys every name. Without a secret, anyone who has the model and guesses a
    /// prompt can compute its names, and tell whether a store has the prompt.
    #[must_use]
    pub fn with_tenant_key(mut self, key: [u8; 32]) -> Self {
        self.tenant_key = Some(key);
        self
    }

    /// Returns the digest of the model.
    pub fn model(&self) -> ModelDigest {
        self.model
    }

    /// Returns the root of the names of one group's chunks. `encoding_key` is
    /// [`CacheState::encoding_key`](kv_core::scheduling::CacheState::encoding_key), salt and
    /// adapter are those of [`StartOptions`](kv_core::StartOptions).
    ///
    /// # Errors
    /// [`UnknownAdapter`] for an adapter without a digest: its blocks take no part in tiers.
    pub fn root(
        &self,
        spec: &ChunkSpec,
        encoding_key: u128,
        salt: &[u8],
        adapter: Option<u64>,
    ) -> Result<ChunkRoot, UnknownAdapter> {
        let digest = self.adapter_digest(adapter)?;
        Ok(ChunkRoot::new(self, spec, encoding_key, (salt, adapter.zip(digest))))
    }

    /// Iterates over the numbers of the adapters that have a digest.
    pub(crate) fn adapters(&self) -> impl Iterator<Item = u64> + '_ {
        self.adapters.keys().copied()
    }

    /// Returns the digest of an adapter; `None` for the model itself.
    pub(crate) fn adapter_digest(
        &self,
        adapter: Option<u64>,
    ) -> Result<Option<ModelDigest>, UnknownAdapter> {
        let Some(number) = adapter else { return Ok(None) };
        self.adapters.get(&number).copied().map(Some).ok_or(UnknownAdapter { number })
    }

    /// Returns a digest of a salt, by which a file can be refused that does not have the salt
    /// itself. It cannot be guessed from guessed salts if there is a tenant's key.
    pub(crate) fn salt_digest(&self, salt: &[u8]) -> [u8; 32] {
        let mut hash = match &self.tenant_key {
            Some(key) => blake3::Hasher::new_keyed(key),
            None => blake3::Hasher::new(),
        };
        hash.update(b"kv-tier digest of a salt").update(salt);
        *hash.finalize().as_bytes()
    }
}

/// Leaves out the tenant's key.
impl fmt::Debug for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Identity")
            .field("model", &self.model)
            .field("adapters", &self.adapters)
            .field("numerics", &self.numerics)
            .field("has_tenant_key", &self.tenant_key.is_some())
            .finish()
    }
}

/// An adapter whose digest was not given to the [`Identity`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("adapter {number} has no digest, so its blocks have no names outside this process")]
#[non_exhaustive]
pub struct UnknownAdapter {
    /// Number of the adapter.
    pub number: u64,
}
