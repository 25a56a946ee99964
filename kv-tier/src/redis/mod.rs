//! A store in Redis or Valkey.
//!
//! One key holds one chunk. The crate `redis` parses addresses, packs commands and parses replies;
//! the socket is this module's own, because a timeout of a socket bounds one read or write and not
//! a call, and because bytes of a chunk go between the socket and the caller's memory without a
//! copy.
//!
//! # Deadlines
//! Every call ends at its deadline, even if the server stops or sends one byte at a time. A
//! connection on which a call failed or timed out is closed, so a late reply cannot answer another
//! call.
//!
//! # What the server must be set to
//! Eviction is the server's task: set `maxmemory`, and `maxmemory-policy allkeys-lru`. With
//! `noeviction`, Redis's default, a full server refuses every chunk ([`StoreErrorKind::Full`]);
//! [`RedisStore::warnings`] says so after the first call. With `ttl`, a chunk expires after that
//! time without a read. Persistence (`save`, `appendonly`) only costs time: chunks can be computed
//! again.
//!
//! # Security
//! Whoever can write to the server can forge chunks: checksums find decay, not malice. Give
//! untrusted readers a user with `+get +exists` only; a tool that lists needs
//! `+scan +strlen +getrange` too. There is no TLS: use a private network or a
//! tunnel.
mod address;
mod connection;
mod list;
mod pool;

use std::fmt::{self, Write as _};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use kv_core::events::Tier;

use crate::listing::remove_listed;
use crate::remote::{StoreUrlError, chunk_path, time_left};
use crate::store::{BlockStore, ChunkAddress, Put, Scope, StoreError, StoreErrorKind};
use address::Settings;
use connection::{Connection, Fault, Reply};
use pool::Pool;

/// A store in Redis or Valkey.
///
/// Connections are made when they are needed, and kept.
pub struct RedisStore {
    settings: Settings,
    pool: Pool,
    warnings: Mutex<Vec<RedisWarning>>,
}

/// A setting of the server with which a cache works badly.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RedisWarning {
    /// The server evicts no chunk.
    #[error(
        "the server evicts no chunk (maxmemory-policy {policy}): when it is full it refuses new \
         ones; set allkeys-lru"
    )]
    NoEviction {
        /// The server's policy.
        policy: String,
    },
    /// The server's memory has no bound.
    #[error("the server has no memory limit and grows until the machine is full; set maxmemory")]
    NoMemoryLimit,
    /// This user may not extend the time to live of a chunk.
    #[error("chunks expire although they are read: {refusal}")]
    ExpiryRefused {
        /// The server's words.
        refusal: String,
    },
}

impl RedisStore {
    /// Creates a store of a URL, without a connection:
    /// `redis://[[user]:password@]host[:port][/db][?prefix=..&ttl=..&connections=N]`.
    ///
    /// | parameter | meaning | default |
    /// |---|---|---|
    /// | `prefix` | written before the path of every key, as it is | none |
    /// | `ttl` | time to live since the last read: `3600`, `90m`, `12h`, `7d` | no limit |
    /// | `connections` | connections at most, 1 to 16 | 2 |
    ///
    /// # Errors
    /// [`StoreUrlError`] for a URL of another form, an unknown or repeated parameter, and a value
    /// that is out of range.
    pub fn from_url(url: &str) -> Result<Self, StoreUrlError> {
        let settings = Settings::parse(url)?;
        let pool = Pool::new(settings.connections);
        Ok(Self { settings, pool, warnings: Mutex::new(Vec::new()) })
    }

    /// Returns the bad settings of the server, in the order in which they were found. The settings
    /// are read whenever a connection is made.
    pub fn warnings(&self) -> Vec<RedisWarning> {
        self.lock_warnings().clone()
    }

    fn lock_warnings(&self) -> MutexGuard<'_, Vec<RedisWarning>> {
        self.warnings.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn warn(&self, warning: RedisWarning) {
        let mut warnings = self.lock_warnings();
        if !warnings.contains(&warning) {
            warnings.push(warning);
        }
    }

    fn key(&self, chunk: &ChunkAddress) -> String {
        format!("{}{}", self.settings.prefix, chunk_path(chunk))
    }

    /// Runs an exchange on a connection that no other call uses. The connection is kept if the
    /// exchange succeeds, and closed otherwise.
    fn exchange<T>(
        &self,
        operation: &str,
        deadline: Instant,
        run: impl FnOnce(&mut Connection) -> Result<T, Fault>,
    ) -> Result<T, StoreError> {
        time_left(deadline, operation)?;
        let exchange = || {
            let mut lease = self.pool.take(deadline)?;
            let mut connection = match lease.idle() {
                Some(connection) => connection,
                None => self.connect(deadline)?,
            };
            connection.set_deadline(deadline);
            let result = run(&mut connection)?;
            lease.keep(connection);
            Ok(result)
        };
        exchange().map_err(|fault: Fault| fault.into_error(operation))
    }

    fn connect(&self, deadline: Instant) -> Result<Connection, Fault> {
        let (connection, found) = Connection::open(&self.settings, deadline)?;
        for warning in found {
            self.warn(warning);
        }
        Ok(connection)
    }

    /// Appends the command that gives a chunk its whole time to live again. Returns whether there
    /// is a reply to [`Self::read_extension`].
    fn extend(&self, key: &str, commands: &mut Vec<u8>) -> bool {
        let Some(ttl) = self.settings.ttl_ms else { return false };
        redis::cmd("PEXPIRE").arg(key).arg(ttl).write_packed_command(commands);
        true
    }

    /// Reads the reply to [`Self::extend`]. A refusal does not fail the call, whose own work is
    /// done.
    fn read_extension(&self, connection: &mut Connection) -> Result<(), Fault> {
        match connection.read_integer() {
            Ok(_) => Ok(()),
            Err(Fault::Server(refusal)) => {
                self.warn(RedisWarning::ExpiryRefused { refusal: refusal.to_string() });
                Ok(())
            }
            Err(fault) => Err(fault),
        }
    }
}

impl BlockStore for RedisStore {
    fn tier(&self) -> Tier {
        Tier::Store
    }

    fn contains(
        &self,
        chunks: &[ChunkAddress],
        deadline: Instant,
    ) -> Result<Vec<bool>, StoreError> {
        let mut present = Vec::with_capacity(chunks.len());
        for batch in chunks.chunks(BATCH) {
            let mut commands = Vec::new();
            for chunk in batch {
                redis::cmd("EXISTS").arg(self.key(chunk)).write_packed_command(&mut commands);
            }
            self.exchange("EXISTS", deadline, |connection| {
                connection.write(&[&commands])?;
                for _ in batch {
                    present.push(connection.read_integer()? != 0);
                }
                Ok(())
            })?;
        }
        Ok(present)
    }

    fn get(
        &self,
        chunk: &ChunkAddress,
        into: &mut [u8],
        deadline: Instant,
    ) -> Result<Option<usize>, StoreError> {
        let key = self.key(chunk);
        let mut commands = Vec::new();
        redis::cmd("GET").arg(&key).write_packed_command(&mut commands);
        let extends = self.extend(&key, &mut commands);
        let operation = format!("GET {key}");
        let found = self.exchange(&operation, deadline, |connection| {
            connection.write(&[&commands])?;
            let found = match connection.read_reply()? {
                Reply::Nil => None,
                Reply::Bulk(length) => Some(connection.read_bulk(length, into)?),
                other => return Err(other.unexpected("a chunk")),
            };
            if extends {
                self.read_extension(connection)?;
            }
            Ok(found)
        })?;
        match found {
            Some(0) => Err(StoreError::new(StoreErrorKind::Corrupt, format!("{operation}: empty"))),
            found => Ok(found),
        }
    }

    fn put(
        &self,
        chunk: &ChunkAddress,
        bytes: &[u8],
        deadline: Instant,
    ) -> Result<Put, StoreError> {
        let key = self.key(chunk);
        let operation = format!("SET {key}");
        if bytes.is_empty() {
            return Err(StoreError::new(StoreErrorKind::Corrupt, format!("{operation}: empty")));
        }
        if u64::try_from(bytes.len()).map_or(true, |length| length > VALUE_BYTES_MAX) {
            let what = format!("{operation}: {} bytes, Redis keeps 512 MiB", bytes.len());
            return Err(StoreError::new(StoreErrorKind::Denied, what));
        }
        let (head, mut tail) = set_command(&key, bytes.len(), self.settings.ttl_ms);
        // Also for a chunk that was there: it is wanted again.
        let extends = self.extend(&key, &mut tail);
        self.exchange(&operation, deadline, |connection| {
            connection.write(&[&head, bytes, &tail])?;
            let put = match connection.read_reply()? {
                Reply::Okay => Put::New,
                Reply::Nil => Put::WasThere,
                other => return Err(other.unexpected("OK or nothing")),
            };
            if extends {
                self.read_extension(connection)?;
            }
            Ok(put)
        })
    }

    fn remove(&self, chunks: &[ChunkAddress], deadline: Instant) -> Result<(), StoreError> {
        for batch in chunks.chunks(BATCH) {
            let mut command = redis::cmd("UNLINK");
            for chunk in batch {
                command.arg(self.key(chunk));
            }
            self.exchange("UNLINK", deadline, |connection| {
                connection.write(&[&command.get_packed_command()])?;
                connection.read_integer().map(drop)
            })?;
        }
        Ok(())
    }

    fn remove_all(&self, scope: &Scope, deadline: Instant) -> Result<u64, StoreError> {
        remove_listed(self, scope, deadline)
    }
}

/// Does not write the password.
impl fmt::Debug for RedisStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RedisStore")
            .field("settings", &self.settings)
            .field("warnings", &self.warnings())
            .finish_non_exhaustive()
    }
}

/// Packs a `SET` as the bytes before and after the value, so that the value is not copied. `NX`: an
/// existing chunk is not replaced.
fn set_command(key: &str, length: usize, ttl_ms: Option<u64>) -> (Vec<u8>, Vec<u8>) {
    let mut options = vec!["NX".to_owned()];
    if let Some(ttl) = ttl_ms {
        options.extend(["PX".to_owned(), ttl.to_string()]);
    }
    let arguments = options.len() + 3;
    let key_length = key.len();
    let head = format!("*{arguments}\r\n$3\r\nSET\r\n${key_length}\r\n{key}\r\n${length}\r\n");
    let mut tail = String::from("\r\n");
    for option in options {
        let _ = write!(tail, "${}\r\n{option}\r\n", option.len());
    }
    (head.into_bytes(), tail.into_bytes())
}

/// Keys in one exchange.
const BATCH: usize = 1_024;
/// The largest value of Redis (`proto-max-bulk-len`).
const VALUE_BYTES_MAX: u64 = 512 << 20;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_set_is_packed_as_the_crate_packs_it() {
        for ttl in [None, Some(86_400_000)] {
            let (head, tail) = set_command("a:v1/b", 5, ttl);
            let mut command = redis::cmd("SET");
            command.arg("a:v1/b").arg("value").arg("NX");
            if let Some(ttl) = ttl {
                command.arg("PX").arg(ttl);
            }
            assert_eq!([&head[..], b"value", &tail].concat(), command.get_packed_command());
        }
    }

    #[test]
    fn a_store_does_not_print_its_password() {
        let store = RedisStore::from_url("redis://me:s3cret@h/3?prefix=x:&ttl=1d").unwrap();
        let printed = format!("{store:?}");
        assert!(!printed.contains("s3cret") && printed.contains("x:"), "{printed}");
    }
}
