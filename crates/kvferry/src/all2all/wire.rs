//! The messages between ranks: one frame per message, little-endian, every length checked.
//!
//! ```text
//! magic u32 | kind u8 | label bytes u8 | flags u16 | sequence u64 | payload bytes u32 | label | payload
//! ```

use std::time::Duration;

use super::setup::SetupError;

/// Most bytes a rank gives to a gather.
pub const MAX_GATHER: usize = 64 << 10;
/// Most bytes of a step's name.
pub const MAX_LABEL: usize = 64;
/// Most bytes of a communicator's name.
pub(crate) const MAX_NAME: usize = 64;

const MAGIC: u32 = 0x314d_564b; // "KVM1": the version is part of it.
const HEADER: usize = 20;
/// Flag of parts: see [`Message::Part`].
const COUNTED: u8 = 1;

/// What a rank tells all others at any time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Notice {
    /// The sender's communicator is broken.
    Abort {
        /// Why, as a code of the sender's.
        kind: u32,
        /// The rank at fault, as the sender sees it.
        peer: usize,
        /// Epoch of the call that broke it.
        epoch: u64,
    },
    /// The sender closes in order.
    Bye,
}

/// A decoded message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Message {
    Hello(Hello),
    /// The listener takes the connection.
    Welcome,
    /// The listener turns it away. `stale`: it is not the one the caller looks for, who should look again.
    Refuse {
        stale: bool,
        reason: String,
    },
    /// A rank's part of collective step `sequence`. `counted`: the last eight bytes are how many calls it had begun before.
    Part {
        sequence: u64,
        label: String,
        payload: Vec<u8>,
        counted: bool,
    },
    /// The sender gave up on that step.
    Withdraw {
        sequence: u64,
        /// Name of the step, as the sender takes it.
        step: String,
        /// The rank that gave up first.
        origin: u32,
        /// A rank whose death is the reason.
        culprit: Option<u32>,
        reason: String,
    },
    Notice(Notice),
}

/// The first message on a connection, from the higher rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Hello {
    pub(crate) rank: u32,
    pub(crate) world: u32,
    /// The rank it wants to reach.
    pub(crate) to: u32,
    /// What the listener published at the rendezvous: proof that both met there, in this run.
    pub(crate) token: Token,
    pub(crate) pid: u32,
    pub(crate) name: String,
}

/// A number nobody can guess, one per listener.
pub(crate) type Token = [u8; 16];

/// A frame that breaks the rules.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("a malformed message of {len} bytes: {why}")]
pub(crate) struct WireError {
    len: usize,
    why: &'static str,
}

impl Message {
    pub(crate) fn encode(&self) -> Vec<u8> {
        match self {
            Message::Hello(hello) => {
                let mut payload = Vec::with_capacity(32 + hello.name.len());
                for word in [hello.rank, hello.world, hello.to, hello.pid] {
                    payload.extend(word.to_le_bytes());
                }
                payload.extend(hello.token);
                frame(1, 0, &hello.name, &payload)
            }
            Message::Welcome => frame(2, 0, "", &[]),
            Message::Refuse { stale, reason } => frame(3, u64::from(*stale), "", reason.as_bytes()),
            Message::Part { sequence, label, payload, counted } => part(*sequence, label, payload, *counted),
            Message::Withdraw { sequence, step, origin, culprit, reason } => {
                let mut payload = origin.to_le_bytes().to_vec();
                payload.extend(culprit.unwrap_or(u32::MAX).to_le_bytes());
                payload.extend(reason.as_bytes());
                frame(5, *sequence, step, &payload)
            }
            Message::Notice(Notice::Abort { kind, peer, epoch }) => {
                let mut payload = kind.to_le_bytes().to_vec();
                payload.extend((*peer as u32).to_le_bytes());
                frame(6, *epoch, "", &payload)
            }
            Message::Notice(Notice::Bye) => frame(7, 0, "", &[]),
        }
    }

    pub(crate) fn decode(bytes: &[u8]) -> Result<Message, WireError> {
        let bad = |why| WireError { len: bytes.len(), why };
        let (header, rest) = bytes.split_at_checked(HEADER).ok_or(bad("shorter than a header"))?;
        if word(header, 0) != Some(MAGIC) {
            return Err(bad("another protocol or version"));
        }
        let (kind, label_len) = (header[4], usize::from(header[5]));
        if label_len > MAX_LABEL {
            return Err(bad("the label is too long"));
        }
        let sequence = long(header, 8).ok_or(bad("no sequence"))?;
        let payload_len = word(header, 16).ok_or(bad("no length"))? as usize;
        if payload_len > MAX_GATHER || rest.len() != label_len + payload_len {
            return Err(bad("the lengths do not add up"));
        }
        let (label, payload) = rest.split_at(label_len);
        let label = std::str::from_utf8(label).map_err(|_| bad("the label is no text"))?;
        match kind {
            1 => {
                let field = |at| word(payload, at).ok_or(bad("a short hello"));
                let token = payload.get(16..32).and_then(|token| Token::try_from(token).ok());
                Ok(Message::Hello(Hello {
                    rank: field(0)?,
                    world: field(4)?,
                    to: field(8)?,
                    pid: field(12)?,
                    token: token.ok_or(bad("a short hello"))?,
                    name: label.to_owned(),
                }))
            }
            2 => Ok(Message::Welcome),
            3 => Ok(Message::Refuse {
                stale: sequence != 0,
                reason: String::from_utf8_lossy(payload).into_owned(),
            }),
            4 => Ok(Message::Part {
                sequence,
                label: label.to_owned(),
                payload: payload.to_vec(),
                counted: header[6] & COUNTED != 0,
            }),
            5 => {
                let field = |at| word(payload, at).ok_or(bad("a short withdrawal"));
                let (origin, culprit) = (field(0)?, Some(field(4)?).filter(|&culprit| culprit != u32::MAX));
                let reason = String::from_utf8_lossy(&payload[8..]).into_owned();
                Ok(Message::Withdraw { sequence, step: label.to_owned(), origin, culprit, reason })
            }
            6 => {
                let field = |at| word(payload, at).ok_or(bad("a short abort"));
                let (kind, peer) = (field(0)?, field(4)? as usize);
                Ok(Message::Notice(Notice::Abort { kind, peer, epoch: sequence }))
            }
            7 => Ok(Message::Notice(Notice::Bye)),
            _ => Err(bad("an unknown kind")),
        }
    }
}

/// A part without copying its payload into a [`Message`] first.
pub(crate) fn part(sequence: u64, label: &str, payload: &[u8], counted: bool) -> Vec<u8> {
    let mut bytes = frame(4, sequence, label, payload);
    if counted && let Some(flags) = bytes.get_mut(6) {
        *flags |= COUNTED;
    }
    bytes
}

/// Texts longer than their field are cut: callers check what must not be.
fn frame(kind: u8, sequence: u64, label: &str, payload: &[u8]) -> Vec<u8> {
    let label = &label.as_bytes()[..label.len().min(MAX_LABEL)];
    let payload = &payload[..payload.len().min(MAX_GATHER)];
    let mut bytes = Vec::with_capacity(HEADER + label.len() + payload.len());
    bytes.extend(MAGIC.to_le_bytes());
    bytes.extend([kind, label.len() as u8, 0, 0]);
    bytes.extend(sequence.to_le_bytes());
    bytes.extend((payload.len() as u32).to_le_bytes());
    bytes.extend(label);
    bytes.extend(payload);
    bytes
}

fn word(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_le_bytes(bytes.get(at..at + 4)?.try_into().ok()?))
}

fn long(bytes: &[u8], at: usize) -> Option<u64> {
    Some(u64::from_le_bytes(bytes.get(at..at + 8)?.try_into().ok()?))
}

/// Checks the length of a text that goes into a frame.
pub(crate) fn check_text(what: &str, text: &str, limit: usize) -> Result<(), SetupError> {
    if text.len() > limit {
        return Err(SetupError::TooLarge { what: what.to_owned(), value: text.len(), limit });
    }
    Ok(())
}

/// What is left of a time limit.
pub(crate) fn left(start: std::time::Instant, timeout: Duration) -> Duration {
    timeout.saturating_sub(start.elapsed())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn examples() -> Vec<Message> {
        vec![
            Message::Hello(Hello {
                rank: 3,
                world: 5,
                to: 1,
                token: [7; 16],
                pid: 4_000_000,
                name: "décode".to_owned(),
            }),
            Message::Welcome,
            Message::Refuse { stale: true, reason: "why".to_owned() },
            Message::Refuse { stale: false, reason: String::new() },
            Message::Part {
                sequence: u64::MAX,
                label: "x".repeat(MAX_LABEL),
                payload: vec![9; MAX_GATHER],
                counted: true,
            },
            Message::Part { sequence: 0, label: String::new(), payload: Vec::new(), counted: false },
            Message::Withdraw {
                sequence: 77,
                step: "reset".to_owned(),
                origin: 2,
                culprit: Some(0),
                reason: "rank 0 died".to_owned(),
            },
            Message::Withdraw {
                sequence: 78,
                step: String::new(),
                origin: 63,
                culprit: None,
                reason: String::new(),
            },
            Message::Notice(Notice::Abort { kind: 2, peer: 63, epoch: 1 << 40 }),
            Message::Notice(Notice::Bye),
        ]
    }

    #[test]
    fn every_kind_survives() {
        for message in examples() {
            assert_eq!(Message::decode(&message.encode()), Ok(message));
        }
    }

    #[test]
    fn every_shortened_or_lengthened_frame_is_refused() {
        for message in examples() {
            let mut bytes = message.encode();
            for len in (0..bytes.len()).rev().take(200).chain(0..bytes.len().min(60)) {
                assert!(Message::decode(&bytes[..len]).is_err(), "{message:?} cut to {len}");
            }
            bytes.push(0);
            assert!(Message::decode(&bytes).is_err());
        }
    }

    proptest! {
        #[test]
        fn no_bytes_bring_it_down(mut bytes in proptest::collection::vec(any::<u8>(), 0..200), plant in any::<bool>()) {
            if plant && bytes.len() >= HEADER {
                bytes[..4].copy_from_slice(&MAGIC.to_le_bytes());
                bytes[4] %= 9;
                bytes[5] %= 8;
                let payload = (bytes.len() - HEADER).saturating_sub(usize::from(bytes[5])) as u32;
                bytes[16..20].copy_from_slice(&payload.to_le_bytes());
            }
            let _ = Message::decode(&bytes);
        }
    }
}
