//! Uploads of bytes, and zeroing. WebGPU's own commands move whole words; a shader handles ranges
//! that do not begin and end at a word.
use kv_core::error::DeviceError;

use crate::buffer::WgpuBuffer;
use crate::params::BytesParams;
use crate::pipelines::Kernel;
use crate::recording::{Recorder, Slot};
use kv_core::num::{to_offset, to_u32, to_u64};

const UPLOAD: &str = "upload";
const ZERO: &str = "zero";
/// Words that one workgroup writes.
const WORDS: u64 = 64;
/// Bytes that one dispatch of the shader moves: below the binding limit of every device.
const PART: usize = 1 << 24;

fn copying() -> Kernel {
    Kernel::new("bytes.wgsl").flags(&["COPY"])
}
fn zeroing() -> Kernel {
    Kernel::new("bytes.wgsl")
}

#[cfg(test)]
pub(crate) fn kernels() -> Vec<Kernel> {
    vec![copying(), zeroing()]
}

pub(crate) fn upload(
    recorder: &mut Recorder,
    (dst, at): (&WgpuBuffer, u64),
    src: &[u8],
) -> Result<(), DeviceError> {
    let len = to_u64(src.len());
    let begin = dst.on(&recorder.shared, (at, len), UPLOAD)?;
    if len == 0 {
        return Ok(());
    }
    if begin.is_multiple_of(4) && len.is_multiple_of(4) {
        let sent = recorder.push(src)?;
        let (from, offset) = (&sent.buffer, sent.offset);
        recorder.encoder()?.copy_buffer_to_buffer(from, offset, dst.buffer(), begin, len);
        return Ok(());
    }
    let mut at = at;
    for part in src.chunks(PART) {
        let sent = recorder.push(part)?;
        let range = (at, to_u64(part.len()));
        run(recorder, (&copying(), UPLOAD), (dst, range), Some(sent.into()))?;
        at += range.1;
    }
    Ok(())
}

pub(crate) fn zero(
    recorder: &mut Recorder,
    (dst, at): (&WgpuBuffer, u64),
    len: u64,
) -> Result<(), DeviceError> {
    let begin = dst.on(&recorder.shared, (at, len), ZERO)?;
    if len == 0 {
        return Ok(());
    }
    if begin.is_multiple_of(4) && len.is_multiple_of(4) {
        recorder.encoder()?.clear_buffer(dst.buffer(), begin, Some(len));
        return Ok(());
    }
    let (mut at, mut left) = (at, len);
    while left > 0 {
        let part = left.min(to_u64(PART));
        run(recorder, (&zeroing(), ZERO), (dst, (at, part)), None)?;
        (at, left) = (at + part, left - part);
    }
    Ok(())
}

fn run(
    recorder: &mut Recorder,
    (kernel, operation): (&Kernel, &'static str),
    (dst, range): (&WgpuBuffer, (u64, u64)),
    src: Option<Slot>,
) -> Result<(), DeviceError> {
    let (slot, dst_begin) = recorder.slot(dst, range, (true, operation))?;
    let len = to_u32(to_offset(range.1));
    let words = range.1.div_ceil(4) + 1;
    let groups = recorder.groups(words.div_ceil(WORDS))?;
    let slots: Vec<_> = std::iter::once(slot).chain(src).collect();
    let params = BytesParams { src_begin: 0, dst_begin, len, pad: 0 };
    recorder.dispatch(kernel, &params, &slots, groups)
}
