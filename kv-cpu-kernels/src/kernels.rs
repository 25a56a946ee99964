//! The safe entry points: they select a table, and make the checks on which soundness rests.
use kv_format::KvFormat;

use crate::decode::{GROUP, HALF};
use crate::features::Isa;
use crate::layout::{Element, Encoding, RowLayout};
use crate::prefetch::PrefetchTarget;
use crate::pv::{OUTPUT_PAD, Pv};
use crate::qk::{Qk, SCORE_PAD};
use crate::rows::{KeyRows, TileRows};
use crate::scalar;
use crate::softmax::Softmax;
use crate::table::{PvFn, QkFn, TILE_ROWS, Table};

/// The kernels of an instruction set that this CPU has.
#[derive(Clone, Copy)]
pub struct Kernels {
    isa: Isa,
    table: &'static Table,
    prefetch: PrefetchTarget,
}

impl std::fmt::Debug for Kernels {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Kernels")
            .field("isa", &self.isa)
            .field("prefetch", &self.prefetch)
            .finish_non_exhaustive()
    }
}

impl Kernels {
    /// Returns the kernels of `isa`, `None` when this CPU lacks it.
    pub fn new(isa: Isa, prefetch: PrefetchTarget) -> Option<Self> {
        if !isa.is_available() {
            return None;
        }
        let table = match isa {
            isa if isa.is_scalar() => &scalar::TABLE,
            #[cfg(target_arch = "x86_64")]
            isa if isa.is_avx2() => &crate::avx2::TABLE,
            #[cfg(target_arch = "x86_64")]
            isa if isa.is_avx512() => &crate::avx512::TABLE,
            #[cfg(target_arch = "aarch64")]
            isa if isa.is_neon() => &crate::neon::TABLE,
            _ => return None,
        };
        Some(Self { isa, table, prefetch })
    }

    /// Returns sixteen lanes in plain Rust with all optional parts, for any CPU.
    #[cfg(any(test, feature = "testing"))]
    pub fn emulated() -> Self {
        let isa = Isa::EMULATED;
        Self { isa, table: &crate::testing::wide::TABLE, prefetch: PrefetchTarget::L2 }
    }

    /// Returns the same lanes with AMX in plain Rust.
    #[cfg(any(test, feature = "testing"))]
    pub fn emulated_amx() -> Self {
        Self { isa: Isa::EMULATED_AMX, ..Self::emulated() }
    }

    /// The table of AMX kernels, where the instruction set has AMX.
    #[cfg(any(target_arch = "x86_64", test, feature = "testing"))]
    pub(crate) fn amx(self) -> Option<&'static crate::amx::table::Table> {
        #[cfg(any(test, feature = "testing"))]
        if self.isa.is_emulated() {
            return self.isa.has_amx().then_some(&crate::testing::amx::TABLE);
        }
        #[cfg(target_arch = "x86_64")]
        if self.isa.has_amx() {
            return Some(&crate::amx::TABLE);
        }
        None
    }

    /// Returns the instruction set.
    pub fn isa(self) -> Isa {
        self.isa
    }
    /// Returns the target of prefetches.
    pub fn prefetch(self) -> PrefetchTarget {
        self.prefetch
    }

    /// Returns the number of query rows to which `rows` are padded with zeros: one tile of four is
    /// faster than tiles of two and one.
    pub fn padded_rows(self, rows: usize) -> usize {
        rows.saturating_add(usize::from(rows % 4 == 3))
    }

    /// Computes scores: dot products of query rows with rows of K.
    ///
    /// # Panics
    /// If rows lie outside of their slices, or `decoded` is shorter than [`Self::decoded_len`].
    #[inline]
    pub fn qk(self, x: &mut Qk<'_, '_>) {
        x.check();
        let encoding = x.k.layout().encoding();
        let words = x.words.and_then(|_| self.qk_words(encoding));
        if let Some(kernels) = words.or_else(|| self.qk_floats(encoding)) {
            // SAFETY: the arguments were checked.
            unsafe { self.qk_by(kernels, x) };
            return;
        }
        self.qk_decoded(x);
    }

    /// Returns the most query rows of a register tile: rows that need no decoding are multiplied
    /// fastest by four rows, which need the fewest loads per product.
    fn rows_most(self, encoding: Encoding) -> usize {
        match encoding {
            Encoding::F32 => self.table.rows_max.min(4),
            _ => self.table.rows_max,
        }
    }

    /// Computes scores by the register tiles of an encoding.
    ///
    /// # Safety
    /// 1. `Qk::check` was called, or the arguments are a part of what it was called for.
    /// 2. The kernels are those of the rows' encoding, of this table.
    #[inline]
    unsafe fn qk_by(self, kernels: [QkFn; 4], x: &mut Qk<'_, '_>) {
        let most = self.rows_most(x.k.layout().encoding());
        if let Some(kernel) = of_rows(kernels, x.rows, most) {
            // SAFETY: the CPU has the instruction set, by `Self::new`; conditions 1 and 2.
            unsafe { kernel(x) };
            return;
        }
        let mut row = 0_usize;
        let budget = x.prefetch.budget();
        while row < x.rows {
            let rows = part(x.rows.saturating_sub(row), most);
            x.prefetch.allow_share(budget, (row, rows, x.rows));
            let (q, words) = (row.saturating_mul(x.q_stride), row.saturating_mul(x.q_stride / 2));
            let scores = row.saturating_mul(x.score_stride);
            let mut part = Qk {
                rows,
                q: x.q.get(q..).unwrap_or_default(),
                words: x.words.and_then(|all| all.get(words..)),
                q_stride: x.q_stride,
                k: x.k,
                scores: x.scores.get_mut(scores..).unwrap_or_default(),
                score_stride: x.score_stride,
                decoded: &mut [],
                prefetch: x.prefetch,
            };
            let kernel = of_rows(kernels, rows, most);
            assert!(kernel.is_some(), "a register tile of {rows} rows");
            if let Some(kernel) = kernel {
                // SAFETY: as above; a part of what was checked.
                unsafe { kernel(&mut part) };
            }
            row = row.saturating_add(rows);
        }
    }

    /// Computes scores of rows that are decoded first, a few at a time.
    fn qk_decoded(self, x: &mut Qk<'_, '_>) {
        let kernels = self.qk_floats(Encoding::F32);
        assert!(kernels.is_some(), "every instruction set has register tiles of f32");
        let mut begin = 0_usize;
        let budget = x.prefetch.budget();
        for rows in parts(x.k.runs()) {
            let layout = self.decode_rows(&rows, x.decoded);
            x.prefetch.allow_share(budget, (begin, rows.len(), x.k.len()));
            let decoded = decoded_rows(x.decoded, rows.len(), &layout);
            let mut part = Qk {
                rows: x.rows,
                q: x.q,
                words: None,
                q_stride: x.q_stride,
                k: TileRows::of_run(&decoded),
                scores: x.scores.get_mut(begin..).unwrap_or_default(),
                score_stride: x.score_stride,
                decoded: &mut [],
                prefetch: x.prefetch,
            };
            if let Some(kernels) = kernels {
                // SAFETY: tokens of what was checked: all but the last part of a run have a
                // multiple of `SCORE_PAD` tokens; query rows are padded as decoded rows are.
                unsafe { self.qk_by(kernels, &mut part) };
            }
            begin = begin.saturating_add(rows.len());
        }
    }

    /// Adds rows of V, multiplied with weights, to output rows.
    ///
    /// # Panics
    /// If rows lie outside of their slices, or `decoded` is shorter than [`Self::decoded_len`].
    #[inline]
    pub fn pv(self, x: &mut Pv<'_, '_>) {
        x.check();
        if let Some(kernels) = self.pv_floats(x.v.layout().encoding()) {
            // SAFETY: the arguments were checked.
            unsafe { self.pv_by(kernels, x) };
            return;
        }
        self.pv_decoded(x);
    }

    /// Adds rows of V by the register tiles of an encoding.
    ///
    /// # Safety
    /// 1. `Pv::check` was called, or the arguments are a part of what it was called for.
    /// 2. The kernels are those of the rows' encoding, of this table.
    #[inline]
    unsafe fn pv_by(self, kernels: [PvFn; 4], x: &mut Pv<'_, '_>) {
        let most = self.rows_most(x.v.layout().encoding());
        if let Some(kernel) = of_rows(kernels, x.rows, most) {
            // SAFETY: the CPU has the instruction set, by `Self::new`; conditions 1 and 2.
            unsafe { kernel(x) };
            return;
        }
        let mut row = 0_usize;
        let budget = x.prefetch.budget();
        while row < x.rows {
            let rows = part(x.rows.saturating_sub(row), most);
            x.prefetch.allow_share(budget, (row, rows, x.rows));
            let weights = row.saturating_mul(x.weight_stride);
            let out = row.saturating_mul(x.out_stride);
            let mut part = Pv {
                rows,
                weights: x.weights.get(weights..).unwrap_or_default(),
                weight_stride: x.weight_stride,
                v: x.v,
                out: x.out.get_mut(out..).unwrap_or_default(),
                out_stride: x.out_stride,
                decoded: &mut [],
                prefetch: x.prefetch,
            };
            let kernel = of_rows(kernels, rows, most);
            assert!(kernel.is_some(), "a register tile of {rows} rows");
            if let Some(kernel) = kernel {
                // SAFETY: as above; a part of what was checked.
                unsafe { kernel(&mut part) };
            }
            row = row.saturating_add(rows);
        }
    }

    /// Adds rows of V that are decoded first, a few at a time.
    fn pv_decoded(self, x: &mut Pv<'_, '_>) {
        let kernels = self.pv_floats(Encoding::F32);
        assert!(kernels.is_some(), "every instruction set has register tiles of f32");
        let mut begin = 0_usize;
        let budget = x.prefetch.budget();
        for rows in parts(x.v.runs()) {
            let layout = self.decode_rows(&rows, x.decoded);
            x.prefetch.allow_share(budget, (begin, rows.len(), x.v.len()));
            let decoded = decoded_rows(x.decoded, rows.len(), &layout);
            let mut part = Pv {
                rows: x.rows,
                weights: x.weights.get(begin..).unwrap_or_default(),
                weight_stride: x.weight_stride,
                v: TileRows::of_run(&decoded),
                out: x.out,
                out_stride: x.out_stride,
                decoded: &mut [],
                prefetch: x.prefetch,
            };
            if let Some(kernels) = kernels {
                // SAFETY: tokens of what was checked; output rows are padded as decoded rows are.
                unsafe { self.pv_by(kernels, &mut part) };
            }
            begin = begin.saturating_add(rows.len());
        }
    }

    /// Returns the number of floats that QK and PV need to decode rows of `layout` to memory: 0
    /// where they decode them in registers.
    pub fn decoded_len(self, layout: &RowLayout) -> usize {
        let encoding = layout.encoding();
        // Products of bf16 read no encoding that has no other kernels.
        if self.qk_floats(encoding).is_some() && self.pv_floats(encoding).is_some() {
            return 0;
        }
        decoded_layout(layout).dim() * DECODED_ROWS
    }

    /// Decodes some rows one after another. Returns their layout.
    fn decode_rows(self, rows: &KeyRows<'_>, to: &mut [f32]) -> RowLayout {
        let layout = decoded_layout(rows.layout());
        let kernel = of_encoding(&self.table.decode, rows.layout().encoding());
        // SAFETY: the CPU has the instruction set, by `Self::new`.
        unsafe { kernel(rows, layout.dim(), to) }
        layout
    }

    fn qk_floats(self, encoding: Encoding) -> Option<[QkFn; 4]> {
        match self.lookups(encoding) {
            Some((qk, _)) => Some(qk),
            None => of_encoding(&self.table.qk, encoding),
        }
    }
    fn pv_floats(self, encoding: Encoding) -> Option<[PvFn; 4]> {
        match self.lookups(encoding) {
            Some((_, pv)) => Some(pv),
            None => of_encoding(&self.table.pv, encoding),
        }
    }
    /// Returns the QK and PV kernels by lookups of bytes.
    fn lookups(self, encoding: Encoding) -> Option<([QkFn; 4], [PvFn; 4])> {
        #[cfg(any(test, feature = "testing"))]
        if self.isa.is_emulated() {
            return crate::testing::wide::lookups(encoding);
        }
        #[cfg(target_arch = "x86_64")]
        if self.isa.has_vbmi() {
            return crate::avx512::lookups(encoding);
        }
        no_part(encoding)
    }
    /// Returns the QK kernels by products of bf16.
    fn qk_words(self, encoding: Encoding) -> Option<[QkFn; 4]> {
        #[cfg(any(test, feature = "testing"))]
        if self.isa.is_emulated() {
            return crate::testing::wide::qk_words(encoding);
        }
        #[cfg(target_arch = "x86_64")]
        if self.isa.has_bf16() {
            return crate::avx512::qk_words(encoding, self.isa.has_vbmi());
        }
        no_part(encoding)
    }

    /// Returns whether scores by rows of K in this encoding are products of bf16, where queries are
    /// given as words.
    pub fn takes_words(self, encoding: Encoding) -> bool {
        self.qk_words(encoding).is_some()
    }

    /// Writes a query row as words of two bf16 for [`Qk::words`], half as many as values. The
    /// values are bf16, and in the order of [`RowLayout::in_pairs`] if `in_pairs`.
    ///
    /// # Panics
    /// If `to` is shorter, or the row is no multiple of [`QUERY_PAD`](crate::QUERY_PAD).
    pub fn query_words(self, row: &[f32], (dim, in_pairs): (usize, bool), to: &mut [u32]) {
        assert!(
            row.len().is_multiple_of(crate::QUERY_PAD) && to.len() >= row.len() / 2,
            "a padded row, and room for its words"
        );
        let (groups, words) = (row.as_chunks::<GROUP>().0, to.as_chunks_mut::<HALF>().0);
        let mut first_behind = GROUP;
        for (group, words) in groups.iter().zip(words) {
            // Values after the last whole group keep their own order.
            let split = in_pairs && first_behind <= dim;
            first_behind = first_behind.saturating_add(GROUP);
            let (even, odd) = group.split_at(HALF);
            let pairs = group.as_chunks::<2>().0;
            for ((word, pair), (even, odd)) in words.iter_mut().zip(pairs).zip(even.iter().zip(odd))
            {
                let [first, second] = if split { [*even, *odd] } else { *pair };
                *word = first.to_bits() >> 16 | second.to_bits() & 0xffff_0000;
            }
        }
    }

    /// Returns the factor that decoded values lack: scores and weights are multiplied with it, and
    /// with the scales of rows.
    pub fn factor(self, encoding: Encoding) -> f32 {
        if self.lookups(encoding).is_some() {
            return 1.0;
        }
        of_encoding(&self.table.factor, encoding)
    }

    /// Turns scores into weights.
    ///
    /// # Panics
    /// If rows lie outside of their slices.
    #[inline]
    pub fn softmax(self, x: &mut Softmax<'_>) {
        x.check();
        let [plain, capped] = self.table.softmax;
        let kernel = if x.logits.cap.is_some() { capped } else { plain };
        // SAFETY: the CPU has the instruction set, by `Self::new`; the arguments were checked.
        unsafe { kernel(x) }
    }

    /// Decodes a row without its own scale: `kv_format::row::decode_row` with a scale of 1, to the
    /// bit.
    ///
    /// # Panics
    /// If `from` is shorter than the row, or `to` has another length.
    pub fn decode(self, layout: &RowLayout, from: &[u8], to: &mut [f32]) {
        let kernel = of_encoding(&self.table.decode, layout.encoding());
        assert!(to.len() == layout.dim(), "room for the values of a row");
        let row = KeyRows::new(from, layout.bytes(), 1, layout);
        // SAFETY: the CPU has the instruction set, by `Self::new`.
        unsafe { kernel(&row, to.len(), to) }
    }
    /// Decodes a row with its own scale, or the given one: `kv_format::row::decode_row` to the bit.
    ///
    /// # Panics
    /// As [`Self::decode`].
    pub fn decode_scaled(self, layout: &RowLayout, given: f32, from: &[u8], to: &mut [f32]) {
        if layout.encoding() == Encoding::Nvfp4 {
            // The definition of the format rounds the product of both scales first.
            kv_format::row::decode_row(KvFormat::Nvfp4, given, from, to);
            return;
        }
        self.decode(layout, from, to);
        let scale = if layout.has_scale() {
            let mut scales = [1.0; 16];
            self.row_scales(&KeyRows::new(from, layout.bytes(), 1, layout), &mut scales);
            let [scale, ..] = scales;
            scale
        } else {
            given
        };
        if scale.to_bits() != 1.0_f32.to_bits() {
            self.scale(to, scale);
        }
    }
    /// Reads the scale of each row; the elements after them, up to a multiple of 16, become 1.
    ///
    /// # Panics
    /// If the layout has none, or `to` is shorter than that multiple.
    pub fn row_scales(self, rows: &KeyRows<'_>, to: &mut [f32]) {
        // SAFETY: the CPU has the instruction set, by `Self::new`.
        unsafe { (self.table.row_scales)(rows, to) }
    }
    /// Encodes all of `from` as elements, rounded to nearest even.
    ///
    /// # Panics
    /// If `to` is shorter.
    pub fn encode(self, element: Element, from: &[f32], to: &mut [u8]) {
        let kernel = of_element(self.table.encode, element);
        // SAFETY: the CPU has the instruction set, by `Self::new`.
        unsafe { kernel(from, to) }
    }
    /// Encodes a row as [`kv_format::row::encode_row`] does.
    ///
    /// # Panics
    /// As that function.
    pub fn encode_row(self, format: KvFormat, inv_scale: f32, values: &[f32], row: &mut [u8]) {
        // SAFETY: the CPU has the instruction set, by `Self::new`.
        unsafe { (self.table.encode_row)(format, inv_scale, values, row) }
    }
    /// Computes `row = row * by + other * other_by`, value by value.
    ///
    /// # Panics
    /// If the rows differ in length.
    pub fn combine(self, row: &mut [f32], by: f32, other: &[f32], other_by: f32) {
        // SAFETY: the CPU has the instruction set, by `Self::new`.
        unsafe { (self.table.combine)(row, by, other, other_by) }
    }
    /// Computes `row = row * by`, value by value.
    pub fn scale(self, row: &mut [f32], by: f32) {
        // SAFETY: the CPU has the instruction set, by `Self::new`.
        unsafe { (self.table.scale)(row, by) }
    }
    /// Reorders a row to the order of [`RowLayout::in_pairs`].
    pub fn split_pairs(self, row: &mut [f32]) {
        // SAFETY: the CPU has the instruction set, by `Self::new`.
        unsafe { (self.table.split_pairs)(row) }
    }
    /// Undoes [`Self::split_pairs`].
    pub fn join_pairs(self, row: &mut [f32]) {
        // SAFETY: the CPU has the instruction set, by `Self::new`.
        unsafe { (self.table.join_pairs)(row) }
    }

    /// Copies a run of values from one element type to another, through `f32` where they differ.
    ///
    /// # Panics
    /// If the runs have different numbers of values.
    pub fn convert(self, from: (Element, &[u8]), (element, to): (Element, &mut [u8])) {
        if from.0 == element {
            to.copy_from_slice(from.1);
            return;
        }
        let kernel = of_element(of_element(self.table.convert, from.0), element);
        // SAFETY: the CPU has the instruction set, by `Self::new`.
        unsafe { kernel(from.1, to) }
    }
    /// Returns the copies and conversions that use non-temporal stores.
    pub fn non_temporal(self) -> NonTemporal {
        NonTemporal(self)
    }
}

/// Conversions with non-temporal stores, where the CPU has them. Other threads see the written rows
/// once this is dropped.
#[derive(Debug)]
pub struct NonTemporal(Kernels);

impl NonTemporal {
    /// As [`Kernels::convert`]. Prefetches `ahead` meanwhile.
    ///
    /// # Panics
    /// As [`Kernels::convert`].
    pub fn convert(
        &self,
        from: (Element, &[u8]),
        (element, to): (Element, &mut [u8]),
        ahead: &[u8],
    ) {
        let table = self.0.table;
        let kernel = if from.0 == element {
            table.copy_non_temporal
        } else {
            of_element(of_element(table.convert_non_temporal, from.0), element)
        };
        // SAFETY: the CPU has the instruction set, by `Kernels::new`.
        unsafe { kernel(from.1, to, ahead) }
    }
}

impl Drop for NonTemporal {
    fn drop(&mut self) {
        // SAFETY: the CPU has the instruction set, by `Kernels::new`.
        unsafe { (self.0.table.fence)() }
    }
}

/// Returns the rows of the next register tile, of at most `max`, when `left` are left: a larger
/// tile decodes K and V less often.
const fn part(left: usize, max: usize) -> usize {
    match left {
        0 | 1 => left,
        2 | 3 => 2,
        4..=7 => 4,
        _ if max < 8 => 4,
        _ => 8,
    }
}

/// Tokens that are decoded to memory at a time: 16 rows of 128 values are 8 KiB.
const DECODED_ROWS: usize = SCORE_PAD;

/// Returns the layout of decoded rows: `f32`, padded with zeros as query and output rows are.
fn decoded_layout(layout: &RowLayout) -> RowLayout {
    RowLayout::plain(Element::F32, layout.dim().next_multiple_of(OUTPUT_PAD))
}

/// Returns the first `count` decoded rows.
fn decoded_rows<'a>(memory: &'a [f32], count: usize, layout: &'a RowLayout) -> KeyRows<'a> {
    KeyRows::new(bytemuck::cast_slice(memory), layout.bytes(), count, layout)
}

/// Returns all rows of some runs, [`DECODED_ROWS`] or fewer of a run at a time.
fn parts<'a>(runs: &'a [KeyRows<'a>]) -> impl Iterator<Item = KeyRows<'a>> {
    runs.iter().flat_map(|run| {
        let begins = (0..run.len()).step_by(DECODED_ROWS);
        begins.map(|begin| run.slice(begin..run.len().min(begin.saturating_add(DECODED_ROWS))))
    })
}

/// Returns the kernels of an optional part that an instruction set does not have.
const fn no_part<T: Copy>(_: Encoding) -> Option<T> {
    None
}

/// Returns the kernel for exactly `rows` query rows.
fn of_rows<K: Copy>(kernels: [K; 4], rows: usize, rows_max: usize) -> Option<K> {
    let index = TILE_ROWS.iter().position(|tile| *tile == rows && rows <= rows_max)?;
    kernels.get(index).copied()
}

/// Returns the entry of an element type.
fn of_element<K>([f32, f16, bf16]: [K; 3], element: Element) -> K {
    match element {
        Element::F32 => f32,
        Element::F16 => f16,
        Element::Bf16 => bf16,
    }
}

/// Returns the entry of an encoding.
fn of_encoding<K: Copy>(entries: &[K; Encoding::COUNT], encoding: Encoding) -> K {
    entries[encoding.index()]
}
