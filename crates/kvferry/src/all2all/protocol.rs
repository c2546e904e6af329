//! The decisions of one call, for both backends. The kernel (`cuda/include/kvferry/exchange.cuh`) and the CPU backend
//! carry out the same steps over the same words (`kvferry_kernels`); where they must decide alike, they do as
//! is written here.
//!
//! Call number `e` of a rank, in this order:
//!
//! 0. A rank that has failed fills its result with 0xFF, signals nothing and does not count the call.
//! 1. *Post*: it tells every peer the contract hash, its landing place, how often it will add to the peer's arrival word,
//!    and a verdict; the epoch goes last, with release.
//! 2. *Own share*: it copies what stays, waiting for nobody.
//! 3. *Read all headers*: it waits for the header of every peer, then [judges](judge) them together. A fault ends the call
//!    before a byte has gone anywhere, on every rank, because all see the same headers.
//! 4. *Push*: it copies to each peer, then adds (release) what it announced to the peer's arrival word.
//! 5. *Wait* until every peer has added what it announced, on top of all it added in earlier calls of this parity that
//!    ran.
//! 6. *Leave*: the arrivals of this call count as expected from now on, and so does the call.
//!
//! Why acquire and release are enough, without a stronger order anywhere: every wait is on one word that one rank writes
//! (the epoch of a cell, the arrival word of a source), and what must be seen is what that rank did before: the other
//! words of its header (step 1), or its copies (step 4). No decision compares words of two ranks for which came first: a
//! rank acts when *all* headers are there, and again when *all* arrivals are. What one rank learns from another through
//! a third does not occur. Words are never reset while calls run: epochs and arrivals only grow and are compared with
//! `>=`, so a late reader loses nothing.
//!
//! Why two cells per pair are enough: a rank writes its header of call `e + 2` only after it has finished `e + 1`, hence
//! after my header of `e + 1`, which I post only when I have left call `e`. Nobody reads a cell of `e` any more then.
//!
//! Why a landing place is safe: a peer writes there only after my header of this call, and I post a place only when
//! nobody holds what lies there (a lease) and, on GPUs, after the work that read it (its fences).

use std::fmt;

use super::error::FaultKind;
use super::plan::difference;

/// Whether a call uses the words of even or odd epochs.
pub(crate) const fn parity(epoch: u64) -> u64 {
    epoch & 1
}

/// Landing places are multiples of this.
pub(crate) const LANDING_ALIGN: u64 = 16;

/// What a rank has told of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Header {
    pub(crate) hash: u64,
    pub(crate) place: u64,
    pub(crate) arrivals: u64,
    pub(crate) verdict: u64,
    /// Digests of the contract, where the backend carries them; zeros otherwise.
    pub(crate) digest: [u64; 3],
}

/// The first fault among the headers of all ranks (the own one included), the same on every rank: refusals before
/// differences before bad places, and of each the lowest rank. `reach`: bytes that land at each rank.
pub(crate) fn judge(headers: &[Header], reach: &[u64], pool_bytes: u64) -> Option<(usize, FaultKind)> {
    let refused = headers.iter().position(|header| header.verdict != 0);
    if let Some(peer) = refused {
        return Some((peer, FaultKind::Refused { code: headers[peer].verdict }));
    }
    if let Some((peer, norm)) = odd_one_out(headers) {
        let what = if headers[peer].digest == [0; 3] || headers[norm].digest == [0; 3] {
            "what is called, with which shapes"
        } else {
            difference(headers[norm].digest, headers[peer].digest)
        };
        return Some((
            peer,
            FaultKind::Mismatch { reason: format!("it differs from rank {norm} in {what}") },
        ));
    }
    let outside = headers.iter().zip(reach).position(|(header, &reach)| {
        !header.place.is_multiple_of(LANDING_ALIGN)
            || header.place.checked_add(reach).is_none_or(|end| end > pool_bytes)
    });
    outside.map(|peer| (peer, FaultKind::BadPlace { place: headers[peer].place }))
}

/// The lowest rank whose hash is not that of most ranks, and the lowest rank whose hash is. Of equally frequent hashes
/// the one of the lowest rank counts as that of most: with two ranks, rank 1 is odd on both.
fn odd_one_out(headers: &[Header]) -> Option<(usize, usize)> {
    let first = headers.first()?.hash;
    if headers.iter().all(|header| header.hash == first) {
        return None;
    }
    let count = |hash| headers.iter().filter(|header| header.hash == hash).count();
    let most = headers.iter().map(|header| count(header.hash)).max()?;
    let norm = headers.iter().position(|header| count(header.hash) == most)?;
    let odd = headers.iter().position(|header| header.hash != headers[norm].hash)?;
    Some((odd, norm))
}

/// Why a rank refuses a call before it has begun: the verdict of its headers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u64)]
pub(crate) enum Refusal {
    /// No contract can be made of its arguments.
    Arguments = 1,
    /// An array lies in the wrong memory, or beyond its own.
    Memory = 2,
    /// A result of some rank is larger than the capacity.
    Capacity = 3,
    /// The output does not fit the call, or overlaps an input.
    Output = 4,
    /// No memory for the copy of a result.
    CopyTarget = 5,
    /// The caller's own checks, above this library.
    Caller = 6,
    /// The device or the system said no.
    Device = 7,
    /// It waits in a collective step, not in a call. Never in a header: told by message.
    Elsewhere = 8,
}

impl Refusal {
    const ALL: [Refusal; 8] = [
        Refusal::Arguments,
        Refusal::Memory,
        Refusal::Capacity,
        Refusal::Output,
        Refusal::CopyTarget,
        Refusal::Caller,
        Refusal::Device,
        Refusal::Elsewhere,
    ];

    /// As it stands in a header.
    pub(crate) const fn code(self) -> u64 {
        self as u64
    }

    pub(crate) fn from_code(code: u64) -> Option<Refusal> {
        Refusal::ALL.into_iter().find(|refusal| refusal.code() == code)
    }
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Refusal::Arguments => "it refused its own arguments",
            Refusal::Memory => "it was given an array in memory that cannot be used",
            Refusal::Capacity => "a result exceeds the capacity",
            Refusal::Output => "it was given an output that does not fit",
            Refusal::CopyTarget => "it had no memory to copy the result to",
            Refusal::Caller => "its caller refused the call",
            Refusal::Device => "its device refused the call",
            Refusal::Elsewhere => "it is in reset() or empty_output(), which other ranks are not",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn header(hash: u64) -> Header {
        Header { hash, place: 0, arrivals: 1, verdict: 0, digest: [hash, 7, 7] }
    }

    #[test]
    fn every_rank_names_the_same_odd_one() {
        let judge_hashes = |hashes: &[u64]| {
            let headers: Vec<Header> = hashes.iter().map(|&hash| header(hash)).collect();
            judge(&headers, &vec![0; hashes.len()], 4096).map(|(peer, _)| peer)
        };
        assert_eq!(judge_hashes(&[5, 5, 5]), None);
        assert_eq!(judge_hashes(&[5]), None);
        assert_eq!(judge_hashes(&[5, 6]), Some(1));
        assert_eq!(judge_hashes(&[5, 6, 6]), Some(0));
        assert_eq!(judge_hashes(&[5, 6, 5, 7]), Some(1));
        assert_eq!(judge_hashes(&[5, 6, 7]), Some(1));
    }

    #[test]
    fn refusals_come_before_differences_before_places() {
        let mut headers = [header(1), header(2), header(1)];
        headers[0].place = 8;
        headers[2].verdict = Refusal::Capacity.code();
        let reach = [16, 16, 16];
        assert_eq!(judge(&headers, &reach, 4096), Some((2, FaultKind::Refused { code: 3 })));
        headers[2].verdict = 0;
        let Some((1, FaultKind::Mismatch { reason })) = judge(&headers, &reach, 4096) else {
            panic!("rank 1 differs")
        };
        assert!(reason.contains("rank 0") && reason.contains("dtype"), "{reason}");
        headers[1] = headers[2];
        assert_eq!(judge(&headers, &reach, 4096), Some((0, FaultKind::BadPlace { place: 8 })));
        headers[0].place = 4080;
        assert_eq!(judge(&headers, &reach, 4096), None);
        headers[2].place = 4096;
        assert_eq!(judge(&headers, &reach, 4096), Some((2, FaultKind::BadPlace { place: 4096 })));
        headers[2].place = !15;
        assert!(judge(&headers, &reach, 4096).is_some());
        assert_eq!(judge(&headers, &[16, 16, 0], 4096).map(|(peer, _)| peer), Some(2));
    }

    #[test]
    fn codes_of_refusals_come_back() {
        for refusal in Refusal::ALL {
            assert_eq!(Refusal::from_code(refusal.code()), Some(refusal));
        }
        assert_eq!(Refusal::from_code(0), None);
    }
}
