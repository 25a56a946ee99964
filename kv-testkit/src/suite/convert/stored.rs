//! Rows that are encoded to a stored format and decoded again, compared with the definition of the
//! format bit by bit.
use kv_core::backend::Queue;
use kv_core::error::{DeviceErrorKind, PlanError};
use kv_core::plan::{ConvertArgs, ConvertPlan};
use kv_core::{Axes, CacheError, DType, KvFormat, TensorView, TensorViewMut};
use kv_quant::row::{decode_row, encode_row};

use super::End;
use crate::case::{At, CaseError, CaseResult, Outcome, ensure, refused};
use crate::device::{Device, Place, Staged, fetch};
use crate::fixture::{AXES, check_rows};
use crate::rng::Rng;
use crate::tokens::{Padding, TokenLayout};

/// The formats that rows in f32 are encoded to.
const FORMATS: [KvFormat; 1] = [KvFormat::Q8_0];
/// Bytes before the rows in their buffer, and after them: of one word, rows and others may share
/// the halves.
const BEFORE: usize = 6;
const AFTER: usize = 10;
/// The byte around the rows, which no call may change.
const AROUND: u8 = 0xA5;

/// A batch of rows, and the same in a stored format.
struct Batch {
    format: KvFormat,
    heads_dim: [usize; 2],
    rows: Vec<Vec<f32>>,
    stored: Vec<u8>,
}

impl Batch {
    fn new(format: KvFormat, heads_dim: [usize; 2], rows: Vec<Vec<f32>>) -> Self {
        let bytes = format.row_bytes(heads_dim[1] as u32) as usize;
        let values = rows.iter().flat_map(|entry| entry.chunks(heads_dim[1]));
        let encoded = values.flat_map(|values| {
            let mut row = vec![0; bytes];
            encode_row(format, 1.0, values, &mut row);
            row
        });
        let stored = encoded.collect();
        Self { format, heads_dim, rows, stored }
    }
    fn lens(&self) -> Vec<usize> {
        self.rows.iter().map(|rows| rows.len() / self.heads_dim.iter().product::<usize>()).collect()
    }
    fn plan(&self) -> Result<ConvertPlan, PlanError> {
        ConvertPlan::new(&self.lens().iter().map(|len| *len as u32).collect::<Vec<_>>())
    }
    /// Returns what the stored rows decode to.
    fn decoded(&self) -> Vec<Vec<f32>> {
        let dim = self.heads_dim[1];
        let mut stored = self.stored.chunks(self.format.row_bytes(dim as u32) as usize);
        let decode = |row: &mut [f32]| {
            let bytes = stored.next().unwrap_or_default();
            decode_row(self.format, 1.0, bytes, row);
        };
        let mut rows = self.rows.clone();
        rows.iter_mut().flat_map(|entry| entry.chunks_mut(dim)).for_each(decode);
        rows
    }
    /// Returns the stored rows with the bytes around them.
    fn surrounded(&self) -> Vec<u8> {
        [&[AROUND; BEFORE][..], &self.stored, &[AROUND; AFTER]].concat()
    }

    /// Encodes the rows, and compares every byte of the buffer.
    fn encode<B: Device>(&self, backend: &B, from: End) -> Result<(), CaseError> {
        let (plan, lens) = (self.plan()?, self.lens());
        let mut queue = backend.queue()?;
        let layout = TokenLayout::new(from.axes, &lens, self.heads_dim, from.padding);
        let tensor = layout.pack(from.dtype, &self.rows, f32::NAN);
        let src = Staged::new(backend, &mut queue, (layout, tensor), from.place)?;
        let bytes = self.stored.len() + BEFORE + AFTER;
        let buffer = backend.alloc(bytes as u64)?;
        queue.upload(&buffer, 0, &vec![AROUND; bytes])?;
        let dst = (self.format, &buffer, BEFORE as u64);
        queue.convert(&plan, ConvertArgs::encode(&plan, (src.view(), from.axes), dst)?)?;
        let got = fetch(backend.capabilities(), &mut queue, &buffer, (0, bytes as u64))?;
        let expected = self.surrounded();
        let differs = got.iter().zip(&expected).position(|(got, expected)| got != expected);
        ensure(differs.is_none(), || {
            let at = differs.unwrap_or(0);
            let (got, expected) = (got[at], expected[at]);
            format!("byte {at} of {bytes}: {got:#04x}, expected {expected:#04x}")
        })
    }

    /// Decodes the stored rows, and compares every value of the tensor.
    fn decode<B: Device>(&self, backend: &B, to: End) -> Result<(), CaseError> {
        let (plan, lens) = (self.plan()?, self.lens());
        let mut queue = backend.queue()?;
        let bytes = self.surrounded();
        let buffer = backend.alloc(bytes.len() as u64)?;
        queue.upload(&buffer, 0, &bytes)?;
        let layout = TokenLayout::new(to.axes, &lens, self.heads_dim, to.padding);
        let mut dst = Staged::output(backend, &mut queue, (layout, to.dtype), to.place)?;
        let src = (self.format, &buffer, BEFORE as u64);
        let args = ConvertArgs::decode(&plan, src, (dst.view_mut(), to.axes))?;
        queue.convert(&plan, args)?;
        let tensor = dst.read(backend.capabilities(), &mut queue)?;
        let got = layout.unpack("decoded", tensor, &lens, 0.0)?;
        for (got, expected) in got.iter().zip(&self.decoded()) {
            check_rows(got, expected, self.heads_dim.iter().product())?;
        }
        Ok(())
    }
}

fn end(rng: &mut Rng) -> End {
    End {
        axes: rng.pick(&AXES),
        dtype: DType::F32,
        padding: Padding {
            batch: rng.below(3) as usize,
            tokens: rng.below(3) as usize,
            gap: rng.pick(&[0, 0, 1, 8]),
        },
        place: rng.pick(&[Place::Host, Place::Device]),
    }
}

/// Rows of whole blocks, of part of a block, and of several with a rest; the dims of a state.
pub(super) fn rows<B: Device>(backend: &B) -> CaseResult {
    let mut rng = Rng::new(5);
    for format in FORMATS {
        for dim in [1, 4, 31, 32, 33, 64, 100, 255, 256, 512, 1000] {
            for lens in [&[3, 1, 4][..], &[1], &[0, 2, 0, 5], &[70], &[0], &[]] {
                let heads = rng.within(1, 3) as usize;
                let mut entry = |len: &usize| -> Vec<f32> {
                    let values = rng.normals(len * heads * dim).into_iter();
                    values.map(|x| x * 100.0).collect()
                };
                let entries: Vec<_> = lens.iter().map(&mut entry).collect();
                let batch = Batch::new(format, [heads, dim], entries);
                let (from, to) = (end(&mut rng), end(&mut rng));
                let place = || format!("{format}, {heads} heads of {dim}, lengths {lens:?}");
                batch.encode(backend, from).at(format!("{}, from {from:?}", place()))?;
                batch.decode(backend, to).at(format!("{}, to {to:?}", place()))?;
            }
        }
    }
    Ok(Outcome::Holds)
}

/// Values at the limits: zeros, NaN, infinities, magnitudes beyond a scale in f16 and far below,
/// halves. Scales are normal numbers before they are rounded, because devices may flush others.
pub(super) fn limits<B: Device>(backend: &B) -> CaseResult {
    let dim = 40;
    let specials = [
        [0.0, -0.0],
        [1.0, f32::NAN],
        [f32::INFINITY, -2.0],
        [1.0, f32::NEG_INFINITY],
        [f32::MAX, f32::MIN],
        [127.0 * 65504.0, 1.0],
        [127.0 * 65520.0, -3e6],
        [1e9, -4e6],
        [1e-7, -3e-8],
        [1e-30, -1e-30],
        [127.0, -0.5],
        [127.0, 126.5],
        [-127.0, 2.5],
    ];
    for format in FORMATS {
        // Each pair in the first block of a row and in its last, which is short; the block beside
        // it is of ordinary values.
        let mut entry = Vec::new();
        for pair in specials {
            for at in [3, 33] {
                let mut row = Rng::new(6).normals(dim);
                let block = if at < 32 { 0..32 } else { 32..dim };
                row[block].fill(0.0);
                row[at..at + 2].copy_from_slice(&pair);
                entry.extend(row);
            }
        }
        let batch = Batch::new(format, [1, dim], vec![entry]);
        for axes in AXES {
            let at = |place| End { axes, dtype: DType::F32, padding: Padding::default(), place };
            for place in [Place::Host, Place::Device] {
                batch.encode(backend, at(place)).at(format!("{format}, {axes:?}"))?;
                batch.decode(backend, at(place)).at(format!("{format}, {axes:?}"))?;
            }
        }
    }
    Ok(Outcome::Holds)
}

pub(super) fn refusals<B: Device>(backend: &B) -> CaseResult {
    let plan = ConvertPlan::new(&[2])?;
    let buffer = backend.alloc(256)?;
    let [ones, mut out] = [[1.0_f32; 64]; 2];
    let halves = [half::f16::ONE; 64];
    let floats = TensorView::host(&ones, &[2, 1, 32]);
    let halves = TensorView::host(&halves, &[2, 1, 32]);
    let encode = |view, format, offset| {
        ConvertArgs::encode(&plan, (view, Axes::Thd), (format, &buffer, offset)).map(|_| ())
    };
    for format in KvFormat::all() {
        for (view, dtype) in [(floats, DType::F32), (halves, DType::F16)] {
            let is_listed = dtype == DType::F32 && FORMATS.contains(&format);
            let expected = PlanError::Conversion { dtype, format };
            let expected = if is_listed { Ok(()) } else { Err(expected) };
            let encoded = encode(view, format, 0);
            ensure(encoded == expected, || format!("{dtype} to {format}: {encoded:?}"))?;
            let to = TensorViewMut::host(&mut out, &[2, 1, 32]);
            let decoded = ConvertArgs::decode(&plan, (format, &buffer, 0), (to, Axes::Thd));
            let decoded = decoded.map(|_| ());
            ensure(dtype != DType::F32 || decoded == expected, || {
                format!("{format} to {dtype}: {decoded:?}")
            })?;
        }
    }
    let [format] = FORMATS;
    refused("an odd offset", encode(floats, format, 1), |e| {
        matches!(e, CacheError::Plan(PlanError::Misaligned { tensor: "dst", align: 2 }))
    })?;
    let short = TensorView::host(&ones[..32], &[1, 1, 32]);
    refused("fewer rows than tokens", encode(short, format, 0), |e| {
        matches!(e, CacheError::Plan(PlanError::Shape { tensor: "src", .. }))
    })?;
    // 68 bytes from byte 190 on: the backend knows the length of its buffer.
    let mut queue = backend.queue()?;
    let past = ConvertArgs::encode(&plan, (floats, Axes::Thd), (format, &buffer, 190))?;
    let is = |e: &CacheError, kind| matches!(e, CacheError::Device(e) if e.kind() == kind);
    refused("rows past the buffer", queue.convert(&plan, past), |e| {
        is(e, DeviceErrorKind::OutOfRange)
    })?;
    let longer = ConvertPlan::new(&[3])?;
    let args = ConvertArgs::encode(&plan, (floats, Axes::Thd), (format, &buffer, 0))?;
    refused("arguments of another plan", queue.convert(&longer, args), |e| {
        is(e, DeviceErrorKind::Unsupported)
    })?;
    Ok(Outcome::Holds)
}
