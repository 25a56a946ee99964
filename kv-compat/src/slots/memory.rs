//! How much memory slots take.
use kv_core::backend::Backend;
use kv_core::spec::GroupSpec;

use crate::slots::KvCacheManager;

impl<B: Backend> KvCacheManager<B> {
    /// Bytes of one slot: K and V of all layers.
    pub fn slot_bytes(&self) -> u64 {
        let layers = u64::from(self.spec.num_layers());
        let layer = self.spec.groups().first().map_or(0, GroupSpec::layer_block_bytes);
        layer * layers
    }
    /// Bytes of all slots.
    pub fn total_bytes(&self) -> u64 {
        self.slot_bytes() * u64::from(self.max_sequences())
    }
    /// Bytes of the slots of live sequences.
    pub fn used_bytes(&self) -> u64 {
        self.slot_bytes() * u64::from(self.active_sequences())
    }
    /// Bytes of the other slots.
    pub fn free_bytes(&self) -> u64 {
        self.total_bytes() - self.used_bytes()
    }
}
