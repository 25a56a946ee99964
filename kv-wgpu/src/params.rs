//! Parameters that the host passes to shaders in a uniform buffer: `shaders/params.wgsl`, field by
//! field.
//!
//! Strides, sizes and offsets in a binding count bytes. Structures are multiples of 16 bytes, as
//! WGSL requires of uniform buffers.
use bytemuck::{Pod, Zeroable};
use kv_core::KvFormat;
use kv_core::backend::kernels;

/// The stored formats that the kernels read and write: the common ones. A test compares them with
/// the constants of the sources.
pub(crate) const FORMATS: &[KvFormat] = kernels::FORMATS;

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

            const _: () = assert!(size_of::<$name>() % 16 == 0, "WGSL needs multiples of 16 bytes");
        )*
        /// Lists names and fields, for the test that compares them with the shaders'.
        #[cfg(test)]
        pub(crate) const FIELDS: &[(&str, &[(&str, &str)])] = &[$(
            (stringify!($name), &[$((stringify!($field), stringify!($kind)),)*]),
        )*];
    };
}

params! {
    /// Rows of tokens in a tensor of the caller.
    struct Tensor {
        /// Bytes of the binding before the first element.
        data: u32,
        /// Bytes from an entry to the next; 0 for `thd`.
        batch_stride: u32,
        token_stride: u32,
        /// 0 `bshd`, 1 `sbhd`, 2 `thd`.
        axes: u32,
        /// 0 f32, 1 f16, 2 bf16.
        dtype: u32,
        batch: u32,
        tokens: u32,
        heads: u32,
        dim: u32,
        pad0: u32,
        pad1: u32,
        pad2: u32,
    }
    /// One segment of the K or the V of one layer.
    struct Plane {
        /// Bytes of the binding before the segment.
        data: u32,
        /// Blocks of the segment: `first..end`.
        first: u32,
        end: u32,
        block_bytes: u32,
        token_stride: u32,
        head_stride: u32,
        wide_head_stride: u32,
        mean_begin: u32,
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
    /// Offsets of the lists of a batch, in words of the binding.
    struct Plan {
        /// 12 words each: kv-core's `PlannedSequence`, and the word at which its block table
        /// begins.
        sequences: u32,
        /// First query and number of queries of every sequence.
        entries: u32,
        /// 4 words each: sequence, begin, end and the index of its first partial result.
        splits: u32,
        /// First slot of every new token.
        slots: u32,
        tables: u32,
        num_sequences: u32,
        num_splits: u32,
        total_new: u32,
    }
    /// Parameters of `bytes.wgsl`.
    struct BytesParams {
        /// Bytes of the source binding before the first.
        src_begin: u32,
        /// Bytes of the target binding before the first.
        dst_begin: u32,
        len: u32,
        pad: u32,
    }
    /// Parameters of `convert.wgsl`.
    struct ConvertParams {
        src: Tensor,
        dst: Tensor,
        num_entries: u32,
        total: u32,
        pad0: u32,
        pad1: u32,
    }
    /// Parameters of `store_rows.wgsl` and `load_rows.wgsl`.
    struct StoredParams {
        rows: Tensor,
        /// Bytes of the binding before the first stored row.
        data: u32,
        row_bytes: u32,
        /// Bytes of the values that share a scale.
        block_bytes: u32,
        num_entries: u32,
        total: u32,
        pad0: u32,
        pad1: u32,
        pad2: u32,
    }
    /// Parameters of `pad.wgsl`.
    struct PadParams {
        out: Tensor,
        num_entries: u32,
        /// Rows that belong to entries.
        total: u32,
        value: f32,
        /// Word of the lists at which entries begin.
        entries: u32,
    }
    /// Parameters of `gather.wgsl`.
    struct GatherParams {
        plane: Plane,
        out: Tensor,
        /// Words of the lists at which ranges and block tables begin.
        ranges: u32,
        tables: u32,
        num_ranges: u32,
        total: u32,
        has_constants: u32,
        pad0: u32,
        pad1: u32,
        pad2: u32,
    }
    /// Parameters of `write.wgsl`, `write_blocks.wgsl` and `stage_tail.wgsl`.
    struct WriteParams {
        plan: Plan,
        rows: Tensor,
        plane: Plane,
        has_constants: u32,
        /// Runs of rows that are quantised in this step.
        num_runs: u32,
        pad0: u32,
        pad1: u32,
    }
    /// Parameters of `copy.wgsl`.
    struct CopyParams {
        /// Bytes of the bindings before the segments.
        src_begin: u32,
        dst_begin: u32,
        runs: u32,
        /// Workgroups that share a run, and the bytes that each copies.
        parts: u32,
        part_bytes: u32,
        pad0: u32,
        pad1: u32,
        pad2: u32,
    }
    /// Attention mask: causal or full, window, sink tokens.
    struct MaskOptions {
        full: u32,
        /// `u32::MAX` without a window.
        window_left: u32,
        sink_tokens: u32,
        pad: u32,
    }
    /// Parameters of `attend.wgsl` and `attend_few.wgsl`.
    struct AttendParams {
        plan: Plan,
        q: Tensor,
        k: Plane,
        v: Plane,
        mask: MaskOptions,
        scale: f32,
        /// 0 without a cap.
        soft_cap: f32,
        group: u32,
        first_tile: u32,
        splits: u32,
        slices: u32,
        segment: u32,
        stats: u32,
        k_constants: u32,
        v_constants: u32,
        pad0: u32,
        pad1: u32,
    }
    /// Parameters of `attend_merge.wgsl`.
    struct MergeParams {
        plan: Plan,
        out: Tensor,
        lse: Tensor,
        v: Plane,
        group: u32,
        first_tile: u32,
        splits: u32,
        slices: u32,
        segments: u32,
        stats: u32,
        rows: u32,
        /// Whether there are sink logits.
        sink_logits: u32,
        v_constants: u32,
        pad0: u32,
        pad1: u32,
        pad2: u32,
    }
}

impl Plane {
    /// Returns whether rows have transforms, block means or 16-bit rows among codes: shaders for
    /// other planes leave that code out.
    pub(crate) fn has_extras(&self) -> bool {
        self.full_precision_prefix > 0
            || self.has_tail != 0
            || self.transforms != 0
            || self.block_means != 0
    }
}
