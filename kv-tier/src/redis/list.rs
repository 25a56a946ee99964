//! Listing of a server's keys, and beginnings of values.
// Reads replies that may be anything.
#![warn(clippy::arithmetic_side_effects, clippy::indexing_slicing)]
use std::ops::ControlFlow;
use std::time::{Duration, Instant};

use super::connection::{Fault, Reply};
use super::{BATCH, RedisStore};
use crate::listing::{ListChunks, Listed, ListedChunk, deadline};
use crate::remote::parse_chunk_path;
use crate::store::{ChunkAddress, StoreError, StoreErrorKind};

impl ListChunks for RedisStore {
    fn list(
        &self,
        limit: Duration,
        visit: &mut dyn FnMut(Listed) -> ControlFlow<()>,
    ) -> Result<(), StoreError> {
        let pattern = format!("{}v1/*", escape_pattern(&self.settings.prefix));
        let mut cursor = "0".to_owned();
        loop {
            let mut scan = redis::cmd("SCAN");
            scan.arg(&cursor).arg("MATCH").arg(&pattern).arg("COUNT").arg(BATCH);
            let (next, keys) = self.exchange("SCAN", deadline(limit), |connection| {
                connection.write(&[&scan.get_packed_command()])?;
                connection.read_scan()
            })?;
            for listed in self.describe(keys, deadline(limit))? {
                if visit(listed).is_break() {
                    return Ok(());
                }
            }
            cursor = next;
            if cursor == "0" {
                return Ok(());
            }
        }
    }

    fn get_front(
        &self,
        chunk: &ChunkAddress,
        into: &mut [u8],
        deadline: Instant,
    ) -> Result<Option<usize>, StoreError> {
        let key = self.key(chunk);
        let Some(last) = into.len().checked_sub(1) else { return Ok(Some(0)) };
        let mut commands = Vec::new();
        redis::cmd("EXISTS").arg(&key).write_packed_command(&mut commands);
        redis::cmd("GETRANGE").arg(&key).arg(0).arg(last).write_packed_command(&mut commands);
        let operation = format!("GETRANGE {key}");
        let (exists, bytes) = self.exchange(&operation, deadline, |connection| {
            connection.write(&[&commands])?;
            let exists = connection.read_integer()? != 0;
            match connection.read_reply()? {
                Reply::Bulk(length) => Ok((exists, connection.read_bulk(length, into)?)),
                other => Err(other.unexpected("bytes of a chunk")),
            }
        })?;
        match bytes {
            0 if exists => {
                Err(StoreError::new(StoreErrorKind::Corrupt, format!("{operation}: empty")))
            }
            0 => Ok(None),
            bytes => Ok(Some(bytes)),
        }
    }
}

impl RedisStore {
    /// Describes the values of keys.
    fn describe(&self, keys: Vec<String>, deadline: Instant) -> Result<Vec<Listed>, StoreError> {
        let mut commands = Vec::new();
        for key in &keys {
            redis::cmd("STRLEN").arg(key).write_packed_command(&mut commands);
        }
        self.exchange("STRLEN", deadline, |connection| {
            connection.write(&[&commands])?;
            let describe = |key: String| {
                let bytes = match connection.read_integer() {
                    Ok(bytes) => u64::try_from(bytes).ok(),
                    // A value of another type.
                    Err(Fault::Server(_)) => None,
                    Err(fault) => return Err(fault),
                };
                let path = key.strip_prefix(&self.settings.prefix);
                let address = path.and_then(parse_chunk_path);
                Ok(match address.zip(bytes) {
                    Some((address, bytes)) => Listed::Chunk(ListedChunk { address, bytes }),
                    None => Listed::Other { path: key },
                })
            };
            keys.into_iter().map(describe).collect()
        })
    }
}

/// Escapes the special characters of a pattern of `SCAN`.
fn escape_pattern(text: &str) -> String {
    let mut pattern = String::with_capacity(text.len());
    for character in text.chars() {
        if matches!(character, '*' | '?' | '[' | ']' | '^' | '-' | '\\') {
            pattern.push('\\');
        }
        pattern.push(character);
    }
    pattern
}
