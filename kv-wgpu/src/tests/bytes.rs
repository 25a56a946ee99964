//! Byte ranges that neither begin nor end at a word.
use super::*;

#[test]
fn uploads_and_zeros_reach_unaligned_bytes() {
    let Some(backend) = open() else { return };
    let mut queue = backend.queue().unwrap();
    let before: Vec<u8> = (100..132).collect();
    let sent: Vec<u8> = (1..=9).collect();
    for at in 0..8_usize {
        for len in 0..sent.len() {
            // The view itself begins at no word, in the middle of other bytes.
            let whole = backend.alloc(32).unwrap();
            queue.upload(&whole, 0, &before).unwrap();
            let part = whole.view(3, 25).unwrap();
            queue.upload(&part, at as u64, &sent[..len]).unwrap();
            let mut expected = before.clone();
            expected[3 + at..][..len].copy_from_slice(&sent[..len]);
            assert_eq!(read(&mut queue, &whole).unwrap(), expected, "{len} bytes at {at}");
            let some = queue.download(&part, at as u64, len as u64).unwrap().wait().unwrap();
            assert_eq!(some, sent[..len], "{len} bytes at {at}");
            queue.zero(&part, at as u64, len as u64).unwrap();
            expected[3 + at..][..len].fill(0);
            assert_eq!(read(&mut queue, &whole).unwrap(), expected, "{len} zeros at {at}");
        }
    }
}

#[test]
fn copies_are_of_whole_words_and_two_buffers() {
    use kv_core::error::DeviceErrorKind::{ForeignHandle, OutOfRange, Unsupported};

    let Some(backend) = open() else { return };
    let mut queue = backend.queue().unwrap();
    let [from, to] = [32, 24].map(|len| backend.alloc(len).unwrap());
    let sent: Vec<u8> = (1..=32).collect();
    queue.upload(&from, 0, &sent).unwrap();
    queue.copy((&from, 8), (&to, 4), 12).unwrap();
    queue.copy((&from, 32), (&to, 24), 0).unwrap();
    let mut expected = vec![0; 24];
    expected[4..16].copy_from_slice(&sent[8..20]);
    assert_eq!(read(&mut queue, &to).unwrap(), expected);
    // A view that begins at no word of its buffer.
    let odd = from.view(2, 16).unwrap();
    queue.copy((&odd, 2), (&to, 0), 4).unwrap();
    expected[..4].copy_from_slice(&sent[4..8]);
    assert_eq!(read(&mut queue, &to).unwrap(), expected);
    let other = open().unwrap().alloc(32).unwrap();
    let mut refused = |from: (&WgpuBuffer, u64), to: (&WgpuBuffer, u64), len: u64, kind| {
        let error = queue.copy(from, to, len).unwrap_err();
        assert_eq!(error.kind(), kind, "{error}");
    };
    refused((&from, 0), (&to, 0), 28, OutOfRange);
    refused((&from, 24), (&to, 0), 12, OutOfRange);
    refused((&from, 0), (&to, 2), 4, Unsupported);
    refused((&from, 0), (&to, 0), 6, Unsupported);
    refused((&odd, 0), (&to, 0), 4, Unsupported);
    refused((&from, 0), (&from, 16), 8, Unsupported);
    refused((&other, 0), (&to, 0), 4, ForeignHandle);
    refused((&from, 0), (&other, 0), 4, ForeignHandle);
    assert_eq!(read(&mut queue, &to).unwrap(), expected, "a refusal has changed nothing");
}

#[test]
fn large_uploads_take_several_dispatches() {
    let Some(backend) = open() else { return };
    let mut queue = backend.queue().unwrap();
    let len = (1 << 24) + 5;
    let sent: Vec<u8> = (0..len).map(|n: u32| (n % 251) as u8).collect();
    let buffer = backend.alloc(sent.len() as u64 + 8).unwrap();
    queue.upload(&buffer, 1, &sent).unwrap();
    let got = read(&mut queue, &buffer).unwrap();
    assert!(got[0] == 0 && got[1..][..sent.len()] == sent && got[sent.len() + 1..] == [0; 7]);
    queue.zero(&buffer, 3, sent.len() as u64 - 3).unwrap();
    let got = read(&mut queue, &buffer).unwrap();
    assert_eq!(got[..3], [0, 0, 1]);
    assert!(got[3..sent.len()].iter().all(|byte| *byte == 0));
    assert_eq!(got[sent.len()..][..1], sent[sent.len() - 1..]);
}

#[test]
fn an_empty_range_at_the_end_of_a_buffer_can_be_bound() {
    let Some(backend) = open() else { return };
    let queue = backend.queue().unwrap();
    let step = queue.recorder.shared.alignment();
    for size in [4, step, 3 * step, 3 * step + 8] {
        let buffer = backend.alloc(size).unwrap();
        let (slot, skip) = queue.recorder.slot(&buffer, (size, 0), (false, "test")).unwrap();
        assert!(slot.offset.is_multiple_of(step) && slot.size > 0, "{slot:?}");
        assert_eq!(slot.offset + u64::from(skip), size);
        assert!(slot.offset + slot.size <= size, "{slot:?}");
    }
}
