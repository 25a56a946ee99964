//! Parameters that the host passes to kernels: `kernels/params.h`, field by field.
//!
//! Addresses are device addresses; strides and sizes count bytes. The emulator's library reports
//! the sizes that the C++ compiler gave these structures, and a test compares them.
use bytemuck::{Pod, Zeroable};
use kv_core::KvFormat;
use kv_core::backend::kernels;

/// The stored formats that the kernels read and write: the common ones. A test compares them with
/// the constants of the sources.
pub(crate) const FORMATS: &[KvFormat] = kernels::FORMATS;

/// An address in device memory; 0 for absent memory.
pub(crate) type Address = u64;

macro_rules! params {
    ($(
        $(#[$doc:meta])*
        struct $name:ident { $($(#[$field_doc:meta])* $field:ident: $kind:ty,)* }
    )*) => {
        $(
            $(#[$doc])*
            #[derive(Debug, Clone, Copy, Default, PartialEq, Pod, Zeroable)]
            #[repr(C)]
            pub(crate) struct $name { $($(#[$field_doc])* pub(crate) $field: $kind,)* }
        )*
        /// Lists names and sizes, for the test that compares them with the kernels'.
        #[cfg(all(test, feature = "emulated"))]
        pub(crate) const SIZES: &[(&str, usize)] =
            &[$((stringify!($name), size_of::<$name>()),)*];
    };
}

params! {
    /// Rows of tokens in a tensor of the caller.
    struct Tensor {
        data: Address,
        batch_stride: u64,
        token_stride: u64,
        axes: u32,
        dtype: u32,
        batch: u32,
        tokens: u32,
        heads: u32,
        dim: u32,
    }
    /// The K or the V of one layer.
    struct Plane {
        base: Address,
        segments: Address,
        constants: Address,
        block_bytes: u64,
        token_stride: u64,
        head_stride: u64,
        wide_head_stride: u64,
        mean_begin: u64,
        blocks_per_segment: u32,
        num_blocks: u32,
        block_size: u32,
        num_kv_heads: u32,
        head_dim: u32,
        format: u32,
        row_bytes: u32,
        scales_begin: u32,
        transforms: u32,
        block_means: u32,
        full_precision_prefix: u32,
        wide_slots: u32,
        wide_per_block: u32,
        has_tail: u32,
    }
    /// One entry of the batch.
    struct Sequence {
        row: u32,
        q_start: u32,
        q_len: u32,
        new_start: u32,
        new_len: u32,
        kv_len: u32,
        coded: u32,
        coded_before: u32,
        sealed_index: u32,
        split_start: u32,
        num_splits: u32,
        table: u32,
    }
    /// One KV split of a sequence.
    struct Split {
        sequence: u32,
        begin: u32,
        end: u32,
        pad: u32,
    }
    /// Counts of the step.
    struct Counts {
        sequences: u32,
        splits: u32,
        total_q: u32,
        total_new: u32,
        q_len_max: u32,
        new_len_max: u32,
        pad0: u32,
        pad1: u32,
    }
    /// The plan of a step for one group of layers.
    struct Plan {
        counts: Address,
        sequences: Address,
        splits: Address,
        slots: Address,
        tables: Address,
    }
    /// Parameters of `update_tables`: entries to change, and the tables.
    struct TableParams {
        changes: Address,
        tables: Address,
        num_changes: u32,
        pad: u32,
    }
    /// Parameters of every kernel that writes new rows.
    struct WriteParams {
        plan: Plan,
        k: Tensor,
        v: Tensor,
        k_plane: Plane,
        v_plane: Plane,
    }
    /// Parameters of every attention kernel.
    struct AttendParams {
        plan: Plan,
        q: Tensor,
        out: Tensor,
        lse: Tensor,
        k_plane: Plane,
        v_plane: Plane,
        sink_logits: Address,
        partial_rows: Address,
        partial_stats: Address,
        partial_index: Address,
        counters: Address,
        scale: f32,
        soft_cap: f32,
        full: u32,
        window_left: u32,
        sink_tokens: u32,
        group: u32,
        q_len_min: u32,
        q_len_max: u32,
    }
    /// A work item of decoding: one KV split of up to 16 query rows of one kv head, and what it
    /// needs of its entry.
    struct WorkItem {
        sequence: u32,
        head: u32,
        row: u32,
        tile_begin: u32,
        tile_end: u32,
        split: u32,
        num_splits: u32,
        partial: u32,
        kv_len: u32,
        q_len: u32,
        q_start: u32,
        table: u32,
    }
    /// Parameters of `plan_decode`.
    struct DecodePlanParams {
        plan: Plan,
        items: Address,
        starts: Address,
        slots: u32,
        kv_heads: u32,
        group: u32,
        full: u32,
        window_left: u32,
        sink_tokens: u32,
        invariant: u32,
        q_len_max: u32,
    }
    /// Parameters of `plan_prefill`.
    struct PrefillPlanParams {
        batch: DecodePlanParams,
        rows: u32,
        pad: u32,
    }
    /// Parameters of `prefill_*`.
    struct PrefillParams {
        attend: AttendParams,
        items: Address,
        count: Address,
    }
    /// Parameters of `decode_*`.
    struct DecodeParams {
        attend: AttendParams,
        items: Address,
        starts: Address,
        stages: u32,
        block_shift: u32,
    }
    /// Rows of one sequence to gather.
    struct Range {
        table: u32,
        begin: u32,
        len: u32,
        coded: u32,
        start: u32,
        pad0: u32,
        pad1: u32,
        pad2: u32,
    }
    /// Parameters of every kernel that gathers rows.
    struct GatherParams {
        plane: Plane,
        out: Tensor,
        ranges: Address,
        tables: Address,
        num_ranges: u32,
        total: u32,
    }
    /// One copy of a block's first slots.
    struct BlockCopy {
        from: u32,
        to: u32,
        slots: u32,
        pad: u32,
    }
    /// Parameters of `copy_blocks`.
    struct CopyParams {
        planes: Address,
        copies: Address,
        num_planes: u32,
        num_copies: u32,
    }
    /// Rows of one entry of a batch.
    struct Entry {
        start: u32,
        len: u32,
    }
    /// Parameters of `convert_rows`.
    struct ConvertParams {
        src: Tensor,
        dst: Tensor,
        entries: Address,
        num_entries: u32,
        total: u32,
    }
    /// Parameters of `store_q8_0` and `load_q8_0`.
    struct StoredParams {
        rows: Tensor,
        stored: Address,
        entries: Address,
        num_entries: u32,
        total: u32,
    }
    /// Parameters of `pad_rows`.
    struct PadParams {
        out: Tensor,
        entries: Address,
        num_entries: u32,
        total: u32,
        value: f32,
        pad: u32,
        counts: Address,
    }
}

impl Plane {
    /// Returns whether rows are unquantised and not transformed.
    pub(crate) fn is_plain(&self) -> bool {
        let is_plain = |format: &KvFormat| format.kernel_code() == self.format;
        KvFormat::PLAIN.iter().any(is_plain) && self.transforms == 0
    }
}

#[cfg(test)]
mod tests {
    use kv_core::backend::kernels::{axes_code, dtype_code};
    use kv_core::{Axes, DType};

    use super::FORMATS;

    const HEADER: &str = include_str!("../kernels/params.h");

    #[test]
    fn formats_have_the_numbers_of_the_kernels() {
        kv_testkit::assert_kernel_formats(HEADER, "KV_FMT_", FORMATS);
    }

    #[test]
    fn element_types_and_axes_have_the_numbers_of_the_kernels() {
        let constants = kv_testkit::kernel_constants(HEADER);
        for (name, dtype) in
            [("KV_F32", DType::F32), ("KV_F16", DType::F16), ("KV_BF16", DType::Bf16)]
        {
            assert_eq!(constants.get(name), Some(&dtype_code(dtype)), "{name}");
        }
        for (name, format) in
            [("KV_BSHD", Axes::Bshd), ("KV_SBHD", Axes::Sbhd), ("KV_THD", Axes::Thd)]
        {
            assert_eq!(constants.get(name), Some(&axes_code(format)), "{name}");
        }
    }
}
