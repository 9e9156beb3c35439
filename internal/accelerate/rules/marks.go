package rules

import (
	"encoding/binary"
	"fmt"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// Packets that may be learnt from carry bits of the cache in their mark, but none that conntrack asks rules of type nat
// for. So only other rules must not see these bits.

func whyMark(marks uint32) string {
	return fmt.Sprintf("compares the mark without a mask that excludes the cache's bits (%#x)", marks)
}

func whySaved(marks uint32) string {
	const text = "copies the mark to or from conntrack's without a mask that excludes the cache's bits (%#x)"
	return fmt.Sprintf(text, marks)
}

// slots are the 4-byte registers of nftables, by number.
type slots [16]bool

// slot returns the number of the first slot of a register: NFT_REG_1 to NFT_REG_4 have four slots each.
func slot(register uint64) int {
	switch {
	case register >= unix.NFT_REG32_00 && register < unix.NFT_REG32_00+16:
		return int(register - unix.NFT_REG32_00)
	case register >= unix.NFT_REG_1 && register <= 4:
		return int(register-unix.NFT_REG_1) * 4
	}
	return 0
}

// any reports whether one of the slots from a register on has a mark; size is in bytes, 0 if it is not known.
func (s slots) any(register uint64, size int) bool {
	first := slot(register)
	last := len(s)
	if size > 0 {
		last = min(last, first+(size+3)/4)
	}
	for _, has := range s[first:last] {
		if has {
			return true
		}
	}
	return false
}

// usesMark says how the rule looks at bits of the packet's mark that are in marks, or copies them to or from
// conntrack's mark; "" if it does neither. Setting the mark from itself, such as by "meta mark set meta mark or
// 0x4000", is no look.
func (r rule) usesMark(marks uint32) string {
	var has, saved slots // values made from bits of the cache, and from the same bits of conntrack's mark
	for _, e := range r.expressions {
		switch e.name {
		case "meta":
			if e.sets(unix.NFTA_META_SREG) {
				isMark := e.data.number(unix.NFTA_META_KEY) == unix.NFT_META_MARK
				if isMark && saved.any(e.data.number(unix.NFTA_META_SREG), 4) {
					return whySaved(marks)
				}
				continue
			}
			to := slot(e.data.number(unix.NFTA_META_DREG))
			has[to], saved[to] = e.data.number(unix.NFTA_META_KEY) == unix.NFT_META_MARK, false
		case "bitwise":
			from, to := slot(e.data.number(unix.NFTA_BITWISE_SREG)), slot(e.data.number(unix.NFTA_BITWISE_DREG))
			kept := e.bitwiseMask()&marks != 0
			has[to], saved[to] = has[from] && kept, saved[from] && kept
		case "byteorder":
			from, to := slot(e.data.number(unix.NFTA_BYTEORDER_SREG)), slot(e.data.number(unix.NFTA_BYTEORDER_DREG))
			has[to], saved[to] = has[from], saved[from]
		case "cmp":
			value, _ := parse(e.data[unix.NFTA_CMP_DATA])
			if has.any(e.data.number(unix.NFTA_CMP_SREG), len(value[unix.NFTA_DATA_VALUE])) {
				return whyMark(marks)
			}
		case "range":
			if has.any(e.data.number(unix.NFTA_RANGE_SREG), 4) {
				return whyMark(marks)
			}
		case "lookup":
			if has.any(e.data.number(unix.NFTA_LOOKUP_SREG), 0) {
				return whyMark(marks)
			}
		case "hash":
			if has.any(e.data.number(unix.NFTA_HASH_SREG), 0) {
				return whyMark(marks)
			}
		case "payload":
			to := slot(e.data.number(unix.NFTA_PAYLOAD_DREG))
			has[to], saved[to] = false, false
		case "ct":
			if e.sets(unix.NFTA_CT_SREG) {
				if has.any(e.data.number(unix.NFTA_CT_SREG), 4) {
					return whySaved(marks) // another rule may look at what this one saves
				}
				continue
			}
			to := slot(e.data.number(unix.NFTA_CT_DREG))
			has[to], saved[to] = false, e.data.number(unix.NFTA_CT_KEY) == unix.NFT_CT_MARK
		case "match":
			if e.data.text(unix.NFTA_MATCH_NAME) == "mark" && markMatchMask(e.data[unix.NFTA_MATCH_INFO])&marks != 0 {
				return whyMark(marks)
			}
		case "target":
			if e.data.text(unix.NFTA_TARGET_NAME) == "CONNMARK" &&
				connmarkBits(e.data.number(unix.NFTA_TARGET_REV), e.data[unix.NFTA_TARGET_INFO])&marks != 0 {
				return whySaved(marks)
			}
		}
	}
	return ""
}

// Modes of CONNMARK.
const (
	connmarkSave    = 1
	connmarkRestore = 2
)

// connmarkBits returns the bits of the packet's mark that CONNMARK copies to or from conntrack's. It reads
// struct xt_connmark_tginfo1: mark, masks of both marks, mode; tginfo2 has a direction and a number of bits to shift by
// before the mode.
func connmarkBits(revision uint64, info []byte) uint32 {
	if len(info) < 15 || revision < 1 || revision > 2 {
		return ^uint32(0)
	}
	ofConntrack, ofPacket := binary.NativeEndian.Uint32(info[4:]), binary.NativeEndian.Uint32(info[8:])
	mode, shift := info[12], byte(0)
	if revision == 2 {
		mode, shift = info[14], info[13]
	}
	switch {
	case mode == connmarkSave:
		return ofPacket
	case mode == connmarkRestore && shift == 0:
		return ofPacket | ofConntrack
	case mode == connmarkRestore:
		return ^uint32(0)
	}
	return 0
}

func (e expression) sets(source uint16) bool { _, ok := e.data[source]; return ok }

// bitwiseMask returns the bits of a mark that the expression keeps: all for operations that are not known here.
func (e expression) bitwiseMask() uint32 {
	const operation = 6 // NFTA_BITWISE_OP; 0 is (register & mask) ^ xor
	mask, _ := parse(e.data[unix.NFTA_BITWISE_MASK])
	value := mask[unix.NFTA_DATA_VALUE]
	if e.data.number(operation) != 0 || len(value) != 4 {
		return ^uint32(0)
	}
	return binary.NativeEndian.Uint32(value)
}

// markMatchMask reads struct xt_mark_mtinfo1: mark, mask, inversion.
func markMatchMask(info []byte) uint32 {
	if len(info) < 8 {
		return ^uint32(0)
	}
	return binary.NativeEndian.Uint32(info[4:])
}

// legacyMarkMask reads the argument of --mark: VALUE or VALUE/MASK.
func legacyMarkMask(argument string) uint32 {
	_, mask, _ := strings.Cut(argument, "/")
	n, err := strconv.ParseUint(mask, 0, 32)
	if err != nil {
		return ^uint32(0)
	}
	return uint32(n)
}

// legacyConnmarkBits is connmarkBits for the words of a rule, from the target's name on.
func legacyConnmarkBits(words []string) uint32 {
	ofPacket, ofConntrack, save, restore := ^uint32(0), ^uint32(0), false, false
	for i, word := range words {
		argument := ""
		if i+1 < len(words) {
			argument = words[i+1]
		}
		switch word {
		case "--save-mark":
			save = true
		case "--restore-mark":
			restore = true
		case "--nfmask":
			ofPacket = legacyMarkMask("/" + argument)
		case "--ctmask":
			ofConntrack = legacyMarkMask("/" + argument)
		case "--left-shift-mark", "--right-shift-mark":
			ofConntrack = ^uint32(0)
		}
	}
	switch {
	case save:
		return ofPacket
	case restore:
		return ofPacket | ofConntrack
	}
	return 0
}
