//! Headers of sessions and handoffs from hostile bytes: nothing panics, and what is read has one
//! form.
//!
//! The first byte chooses the format, and whether the checksum is made right.
#![no_main]

use crc_fast::{CrcAlgorithm, checksum};
use kv_tier::Handoff;
use kv_tier::session::SessionHeader;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let Some((mode, bytes)) = bytes.split_first() else { return };
    let mut bytes = bytes.to_vec();
    if mode & 1 != 0 && bytes.len() >= 8 {
        let at = bytes.len() - 8;
        let sum = checksum(CrcAlgorithm::Crc64Nvme, &bytes[..at]);
        bytes[at..].copy_from_slice(&sum.to_le_bytes());
    }
    if mode & 2 != 0 {
        if let Ok(header) = SessionHeader::from_bytes(&bytes) {
            assert_eq!(header.to_bytes().expect("lists that were read"), bytes);
        }
    } else if let Ok(handoff) = Handoff::from_bytes(&bytes) {
        assert_eq!(handoff.to_bytes(), bytes);
    }
});
