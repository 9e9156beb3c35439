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

// comparesMark reports whether the rule looks at bits of the packet's mark that are in marks. Setting the mark from
// itself, such as by "meta mark set meta mark or 0x4000", is no look.
func (r rule) comparesMark(marks uint32) bool {
	var has slots // a value made from bits of the cache
	for _, e := range r.expressions {
		switch e.name {
		case "meta":
			if e.sets(unix.NFTA_META_SREG) {
				continue
			}
			has[slot(e.data.number(unix.NFTA_META_DREG))] = e.data.number(unix.NFTA_META_KEY) == unix.NFT_META_MARK
		case "bitwise":
			from, to := e.data.number(unix.NFTA_BITWISE_SREG), slot(e.data.number(unix.NFTA_BITWISE_DREG))
			has[to] = has[slot(from)] && e.bitwiseMask()&marks != 0
		case "byteorder":
			from, to := e.data.number(unix.NFTA_BYTEORDER_SREG), slot(e.data.number(unix.NFTA_BYTEORDER_DREG))
			has[to] = has[slot(from)]
		case "cmp":
			value, _ := parse(e.data[unix.NFTA_CMP_DATA])
			if has.any(e.data.number(unix.NFTA_CMP_SREG), len(value[unix.NFTA_DATA_VALUE])) {
				return true
			}
		case "range":
			if has.any(e.data.number(unix.NFTA_RANGE_SREG), 4) {
				return true
			}
		case "lookup":
			if has.any(e.data.number(unix.NFTA_LOOKUP_SREG), 0) {
				return true
			}
		case "hash":
			if has.any(e.data.number(unix.NFTA_HASH_SREG), 0) {
				return true
			}
		case "payload":
			has[slot(e.data.number(unix.NFTA_PAYLOAD_DREG))] = false
		case "ct":
			if e.sets(unix.NFTA_CT_SREG) && has.any(e.data.number(unix.NFTA_CT_SREG), 4) {
				return true // another rule may look at what this one saves
			}
			has[slot(e.data.number(unix.NFTA_CT_DREG))] = false
		case "match":
			if e.data.text(unix.NFTA_MATCH_NAME) == "mark" && markMatchMask(e.data[unix.NFTA_MATCH_INFO])&marks != 0 {
				return true
			}
		}
	}
	return false
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
