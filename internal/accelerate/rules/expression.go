package rules

import (
	"bytes"
	"fmt"
	"slices"

	"golang.org/x/sys/unix"
)

// expression is one expression of a rule.
type expression struct {
	name string
	data attributes
}

func parseExpression(b []byte) (expression, error) {
	a, err := parse(b)
	if err != nil {
		return expression{}, err
	}
	data, err := parse(a[unix.NFTA_EXPR_DATA])
	return expression{a.text(unix.NFTA_EXPR_NAME), data}, err
}

// jumps returns the chains to which the expression may jump.
func (e expression) jumps(maps map[chainName][]string, in chainName) []string {
	switch e.name {
	case "immediate":
		if chain := verdictChain(e.data[unix.NFTA_IMMEDIATE_DATA]); chain != "" {
			return []string{chain}
		}
	case "lookup":
		return maps[chainName{in.family, in.table, e.data.text(unix.NFTA_LOOKUP_SET)}]
	}
	return nil
}

func (r rule) tracks() bool {
	return slices.ContainsFunc(r.expressions, func(e expression) bool {
		switch e.name {
		case "ct", "nat", "masq", "redir", "connlimit", "flow_offload", "synproxy":
			return true
		case "match":
			return slices.Contains(trackingMatches, e.data.text(unix.NFTA_MATCH_NAME))
		case "target":
			return slices.Contains(trackingTargets, e.data.text(unix.NFTA_TARGET_NAME))
		}
		return false
	})
}

// unsafe says which part of the rule is not a function of the flow; "" if there is none. A rule that only counts or
// logs is safe whatever it matches. marks are the bits of the cache in marks, stateful has the sets with state in their
// elements, and what it is.
func (r rule) unsafe(marks uint32, stateful map[chainName]string) string {
	if !slices.ContainsFunc(r.expressions, expression.acts) {
		return ""
	}
	v6, tcp := r.isIPv6(), r.isTCP()
	for _, e := range r.expressions {
		if why := e.unsafe(v6, tcp); why != "" {
			return why
		}
		if e.name == "lookup" {
			set := e.data.text(unix.NFTA_LOOKUP_SET)
			if state := stateful[chainName{r.chain.family, r.chain.table, set}]; state != "" {
				return fmt.Sprintf("%s (elements of set %s)", state, set)
			}
		}
	}
	return r.usesMark(marks)
}

// acts reports whether the expression can change what happens to the packet, apart from ending the rule.
func (e expression) acts() bool {
	has := func(key uint16) bool { _, ok := e.data[key]; return ok }
	switch e.name {
	case "bitwise", "byteorder", "cmp", "connlimit", "counter", "fib", "hash", "last", "limit", "log", "match",
		"numgen", "osf", "quota", "range", "rt", "socket", "tunnel", "xfrm":
		return false
	case "ct":
		return has(unix.NFTA_CT_SREG)
	case "exthdr":
		return has(unix.NFTA_EXTHDR_SREG)
	case "immediate":
		return e.data.number(unix.NFTA_IMMEDIATE_DREG) == unix.NFT_REG_VERDICT
	case "lookup":
		return has(unix.NFTA_LOOKUP_DREG) && e.data.number(unix.NFTA_LOOKUP_DREG) == unix.NFT_REG_VERDICT
	case "meta":
		return has(unix.NFTA_META_SREG)
	case "payload":
		return has(unix.NFTA_PAYLOAD_SREG)
	case "target":
		return !slices.Contains(passiveTargets, e.data.text(unix.NFTA_TARGET_NAME))
	}
	return true
}

func (e expression) unsafe(v6, tcp bool) string {
	switch e.name {
	case "bitwise", "byteorder", "cmp", "counter", "fib", "hash", "immediate", "last", "log", "lookup", "masq", "nat",
		"notrack", "range", "redir", "reject", "rt", "socket":
		return ""
	case "ct":
		return e.unsafeConntrack()
	case "exthdr":
		return e.unsafeOption()
	case "match":
		if name := e.data.text(unix.NFTA_MATCH_NAME); !safeMatch(name) {
			return name
		}
		return ""
	case "meta":
		return e.unsafeMeta()
	case "objref":
		return e.unsafeObject()
	case "payload":
		return e.unsafePayload(v6, tcp)
	case "target":
		if name := e.data.text(unix.NFTA_TARGET_NAME); !safeTarget(name) {
			return "target " + name
		}
		return ""
	case "numgen":
		return "statistic (numgen)"
	case "connlimit":
		return "connlimit (ct count)"
	case "queue":
		return "NFQUEUE (queue)"
	}
	return e.name // limit, quota, tproxy, dynset, fwd, and what later kernels have
}

func (e expression) unsafeConntrack() string {
	switch e.data.number(unix.NFTA_CT_KEY) {
	case unix.NFT_CT_EXPIRATION:
		return "ct expiration"
	case unix.NFT_CT_PKTS:
		return "connbytes (ct packets)"
	case unix.NFT_CT_BYTES:
		return "connbytes (ct bytes)"
	case unix.NFT_CT_AVGPKT:
		return "connbytes (ct avgpkt)"
	}
	if key := e.data.number(unix.NFTA_CT_KEY); key > unix.NFT_CT_ID {
		return fmt.Sprintf("ct (key %d)", key)
	}
	return ""
}

// Keys of meta that golang.org/x/sys has no names for.
const (
	metaTime = 30 // NFT_META_TIME_NS
	metaHour = 32 // NFT_META_TIME_HOUR
	metaLast = 35 // NFT_META_BRI_BROUTE, the last one that is known here
)

func (e expression) unsafeMeta() string {
	key := e.data.number(unix.NFTA_META_KEY)
	if _, set := e.data[unix.NFTA_META_SREG]; set {
		if key == unix.NFT_META_MARK || key == unix.NFT_META_NFTRACE {
			return ""
		}
		return fmt.Sprintf("meta set (key %d)", key)
	}
	switch {
	case key == unix.NFT_META_LEN:
		return "meta length"
	case key == unix.NFT_META_PRIORITY:
		return "meta priority"
	case key == unix.NFT_META_CPU:
		return "meta cpu"
	case key == unix.NFT_META_PRANDOM:
		return "statistic (meta random)"
	case key >= metaTime && key <= metaHour:
		return "time (meta time, day or hour)"
	case key > metaLast:
		return fmt.Sprintf("meta (key %d)", key)
	}
	return ""
}

// Types of objects that are safe to use: counter, ct helper, ct timeout, secmark, ct expectation.
var safeObjects = []uint64{1, 3, 7, 8, 9}

func (e expression) unsafeObject() string {
	kind := e.data.number(unix.NFTA_OBJREF_IMM_TYPE)
	if slices.Contains(safeObjects, kind) {
		return ""
	}
	switch kind {
	case unix.NFT_OBJECT_QUOTA:
		return "quota (object)"
	case unix.NFT_OBJECT_LIMIT:
		return "limit (object)"
	case unix.NFT_OBJECT_CONNLIMIT:
		return "connlimit (object)"
	}
	return "objref"
}

// maxSegment is the TCP option of the maximum segment size, which only SYN packets have. They are never cached.
const maxSegment = 2

// unsafeOption accepts IPv4 options and IPv6 extension headers too, because packets with some are never cached.
func (e expression) unsafeOption() string {
	kind, op := e.data.number(unix.NFTA_EXTHDR_TYPE), e.data.number(unix.NFTA_EXTHDR_OP)
	switch {
	case e.sets(unix.NFTA_EXTHDR_SREG) && kind != maxSegment:
		return "mangle (exthdr set)"
	case op == unix.NFT_EXTHDR_OP_TCPOPT && kind != maxSegment:
		return fmt.Sprintf("tcp option %d", kind)
	case op > unix.NFT_EXTHDR_OP_TCPOPT+1: // the next one is that of IPv4
		return fmt.Sprintf("exthdr (operation %d)", op)
	}
	return ""
}

// unsafePayload accepts reads of MACs, addresses, protocols, ports and TCP flags, which end where these fields do.
func (e expression) unsafePayload(v6, tcp bool) string {
	if _, set := e.data[unix.NFTA_PAYLOAD_SREG]; set {
		return "mangle (payload set)"
	}
	base := e.data.number(unix.NFTA_PAYLOAD_BASE)
	offset, size := e.data.number(unix.NFTA_PAYLOAD_OFFSET), e.data.number(unix.NFTA_PAYLOAD_LEN)
	end := offset + size
	switch {
	case base == unix.NFT_PAYLOAD_LL_HEADER && end <= 14,
		base == unix.NFT_PAYLOAD_TRANSPORT_HEADER && (end <= 4 || tcp && offset == 13 && size == 1),
		base == unix.NFT_PAYLOAD_NETWORK_HEADER && v6 && (offset >= 8 && end <= 40 || offset == 6 && size == 1),
		base == unix.NFT_PAYLOAD_NETWORK_HEADER && !v6 && (offset >= 12 && end <= 20 || offset == 9 && size == 1):
		return ""
	}
	return fmt.Sprintf("payload (base %d, offset %d, %d bytes)", base, offset, size)
}

// isIPv6 reports whether the rule reads IPv6 headers: because of its table, or because it compares the protocol first.
func (r rule) isIPv6() bool {
	if r.chain.family == unix.NFPROTO_IPV6 {
		return true
	}
	protocol := false
	for _, e := range r.expressions {
		switch {
		case e.name == "meta":
			key := e.data.number(unix.NFTA_META_KEY)
			protocol = key == unix.NFT_META_NFPROTO || key == unix.NFT_META_PROTOCOL
		case e.name == "payload":
			protocol = e.data.number(unix.NFTA_PAYLOAD_BASE) == unix.NFT_PAYLOAD_LL_HEADER // bridge: ether type
		case e.name == "cmp" && protocol:
			value, _ := parse(e.data[unix.NFTA_CMP_DATA])
			v := value[unix.NFTA_DATA_VALUE]
			if bytes.Equal(v, []byte{unix.NFPROTO_IPV6}) || bytes.Equal(v, []byte{0x86, 0xdd}) {
				return true
			}
		}
	}
	return false
}

// isTCP reports whether the rule compares the transport protocol with TCP. Without that, the byte of TCP's flags may be
// one of a datagram.
func (r rule) isTCP() bool {
	protocol := false
	for _, e := range r.expressions {
		switch e.name {
		case "meta":
			protocol = e.data.number(unix.NFTA_META_KEY) == unix.NFT_META_L4PROTO
		case "payload":
			offset := e.data.number(unix.NFTA_PAYLOAD_OFFSET)
			protocol = e.data.number(unix.NFTA_PAYLOAD_BASE) == unix.NFT_PAYLOAD_NETWORK_HEADER &&
				e.data.number(unix.NFTA_PAYLOAD_LEN) == 1 && (offset == 9 || offset == 6)
		case "cmp":
			value, _ := parse(e.data[unix.NFTA_CMP_DATA])
			equal := e.data.number(unix.NFTA_CMP_OP) == unix.NFT_CMP_EQ
			if protocol && equal && bytes.Equal(value[unix.NFTA_DATA_VALUE], []byte{unix.IPPROTO_TCP}) {
				return true
			}
		}
	}
	return false
}
