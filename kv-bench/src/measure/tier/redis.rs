//! A store in Redis beside a client that knows one command.
use std::io::{Read as _, Write as _};
use std::net::{TcpStream, ToSocketAddrs as _};
use std::time::Duration;

use kv::tier::redis::RedisStore;
use kv::tier::{BlockStore, ChunkAddress};

use super::error::TierError;
use super::pass::{Comparison, Passes, expect_chunk, soon, timed};
use super::report::TierLine;
use crate::chunks::{Chunks, on_threads, shuffled};
use crate::measure::Progress;
use crate::num::{to_u64, to_usize};

/// Measures the server with one connection and with four.
pub(super) fn measure(
    url: &str,
    rounds: u32,
    chunks: &Chunks,
    progress: &mut dyn Progress,
) -> Result<Vec<TierLine>, TierError> {
    let address = address(url)?;
    let prefix = format!("kv-bench-{}:", std::process::id());
    let open = |connections: u32| {
        let url = format!("redis://{address}?prefix={prefix}&connections={connections}");
        RedisStore::from_url(&url).map_err(TierError::other)
    };
    let store = open(1)?;
    let count = chunks.count_of_store();
    let mut buffer = chunks.buffer();
    let written: Result<(), TierError> = (0..count).try_for_each(|item| {
        chunks.complete(item, &mut buffer)?;
        store.put(&chunks.address(item)?, buffer.bytes(), soon())?;
        Ok(())
    });
    let side = |connections: u32,
                case,
                goal,
                progress: &mut dyn Progress|
     -> Result<TierLine, TierError> {
        let store = open(connections)?;
        let [mut ours, mut theirs] = <[Passes; 2]>::default();
        let mut clients = Vec::new();
        for _ in 0..connections {
            clients.push(Client::connect(&address, chunks.chunk_bytes())?);
        }
        let mut buffers = chunks.buffers(connections);
        for round in 0..=rounds {
            let order = shuffled(count, u64::from(round) + 1);
            let pass = timed(|| {
                on_threads(&mut clients, &order, |client, item| {
                    client.get(&format!("{prefix}{}", key(&chunks.address(item)?)))
                })
            })?;
            theirs.push(round, pass, progress);
            let pass = timed(|| {
                on_threads(&mut buffers, &order, |buffer, item| {
                    let into = buffer.bytes_mut();
                    let read = store.get(&chunks.address(item)?, into, soon());
                    expect_chunk(read, into.len())
                })
            })?;
            ours.push(round, pass, progress);
        }
        let bytes = chunks.chunk_bytes() * to_u64(count);
        let line =
            Comparison { case, peer: "plain RESP client", goal, threads: connections, bytes };
        Ok(line.line(&ours, &theirs))
    };
    let lines = written.and_then(|()| {
        let one = side(1, "get from Redis, 1 connection", 0.7, progress)?;
        Ok(vec![one, side(4, "get from Redis, 4 connections", 0.9, progress)?])
    });
    // Also after a failure.
    let removed = store.remove(&chunks.addresses(count), soon());
    let lines = lines?;
    removed?;
    Ok(lines)
}

/// Returns host and port.
fn address(url: &str) -> Result<String, TierError> {
    // Not the account: an error is printed.
    let shown = url.rsplit_once('@').map_or(url, |(_, host)| host);
    let refused =
        || TierError::Address { given: shown.to_owned(), expected: "redis://HOST[:PORT]" };
    let rest = url.strip_prefix("redis://").or_else(|| url.strip_prefix("valkey://"));
    let host = rest.map(|rest| rest.trim_end_matches('/')).ok_or_else(refused)?;
    if host.is_empty() || host.contains(['@', '/', '?', '#']) {
        return Err(refused());
    }
    let has_port = host.rsplit_once(':').is_some_and(|(_, port)| port.parse::<u16>().is_ok());
    Ok(if has_port { host.to_owned() } else { format!("{host}:6379") })
}

/// Returns the key of a chunk, without a prefix.
fn key(chunk: &ChunkAddress) -> String {
    let root = chunk.root.to_string();
    format!("v1/{}/{}", root.get(..16).unwrap_or_default(), chunk.name)
}

/// A client that reads values of one length into memory of its own.
struct Client {
    stream: TcpStream,
    reply: Vec<u8>,
    /// The line in front of a value.
    head: Vec<u8>,
}

impl Client {
    fn connect(address: &str, value_bytes: u64) -> Result<Self, TierError> {
        const CONNECT: &str = "connection of the plain client";
        let mut addresses = address.to_socket_addrs().map_err(TierError::io(CONNECT))?;
        let address =
            addresses.next().ok_or_else(|| TierError::other("the host has no address"))?;
        let stream = TcpStream::connect_timeout(&address, LIMIT).map_err(TierError::io(CONNECT))?;
        stream.set_nodelay(true).map_err(TierError::io(CONNECT))?;
        stream.set_read_timeout(Some(LIMIT)).map_err(TierError::io(CONNECT))?;
        let head = format!("${value_bytes}\r\n").into_bytes();
        let value = usize::try_from(value_bytes).map_err(TierError::other)?;
        let length = value + head.len() + to_usize(2);
        Ok(Self { stream, reply: vec![0; length], head })
    }

    fn get(&mut self, key: &str) -> Result<(), TierError> {
        const GET: &str = "GET of the plain client";
        let command = format!("*2\r\n$3\r\nGET\r\n${}\r\n{key}\r\n", key.len());
        self.stream.write_all(command.as_bytes()).map_err(TierError::io(GET))?;
        // A missing value has a shorter reply, and would end the wait by its limit.
        let (head, rest) = self.reply.split_at_mut(self.head.len());
        self.stream.read_exact(head).map_err(TierError::io(GET))?;
        if *head != *self.head {
            return Err(TierError::other("the plain client has another value than was written"));
        }
        self.stream.read_exact(rest).map_err(TierError::io(GET))
    }
}

const LIMIT: Duration = Duration::from_secs(30);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_host_and_port() {
        for (url, found) in [
            ("redis://cache", "cache:6379"),
            ("redis://127.0.0.1:7000", "127.0.0.1:7000"),
            ("valkey://cache/", "cache:6379"),
        ] {
            assert_eq!(address(url).unwrap(), found);
        }
        for url in ["cache", "redis://", "redis://:pass@cache", "redis://c/1", "redis://c?ttl=1d"] {
            let error = address(url).unwrap_err();
            assert!(matches!(error, TierError::Address { .. }), "{url}");
            assert!(!error.to_string().contains("pass"), "{error}");
        }
    }
}
