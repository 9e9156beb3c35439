package rules

import (
	"encoding/binary"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"pilaster.io/pilaster/internal/netns"
)

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func namespace(t *testing.T) *netns.Namespace {
	t.Helper()
	ns, err := netns.Create(filepath.Join(t.TempDir(), "ns"))
	must(t, err)
	t.Cleanup(func() { ns.Close(); netns.Remove(ns.Path()) })
	return ns
}

const cacheMarks = 0x1ff0

var wholeMark, savedMark = whyMark(cacheMarks), whySaved(cacheMarks)

func read(t *testing.T, ns *netns.Namespace) (r Report) {
	t.Helper()
	must(t, ns.Do(func() (err error) { r, err = Read(t.Context(), cacheMarks); return err }))
	return r
}

// run executes a command line in the namespace.
func run(t *testing.T, ns *netns.Namespace, line string) {
	t.Helper()
	words := strings.Fields(line)
	var said strings.Builder
	c := exec.CommandContext(t.Context(), words[0], words[1:]...)
	c.Stdout, c.Stderr = &said, &said
	if err := ns.Run(c); err != nil {
		t.Fatalf("%s: %v: %s", line, err, &said)
	}
}

// Rules of iptables, and what must be named; "" for safe rules. Both programs are tried with each.
var iptablesRules = []struct{ rule, why string }{
	{"-A FORWARD -m limit --limit 5/s -j ACCEPT", "limit"},
	{"-A FORWARD -m hashlimit --hashlimit-above 9/s --hashlimit-name x -j DROP", "hashlimit"},
	{"-A FORWARD -m quota --quota 5 -j ACCEPT", "quota"},
	{"-A FORWARD -m connbytes --connbytes 9: --connbytes-dir both --connbytes-mode bytes -j DROP", "connbytes"},
	{"-A FORWARD -p tcp -m connlimit --connlimit-above 3 -j DROP", "connlimit"},
	{"-A FORWARD -m time --timestart 10:00 -j DROP", "time"},
	{"-A FORWARD -m statistic --mode random --probability 0.5 -j DROP", "statistic"},
	{"-A FORWARD -m string --string x --algo bm -j DROP", "string"},
	{"-A FORWARD -m length --length 100: -j DROP", "length"},
	{"-A FORWARD -m ttl --ttl-eq 7 -j DROP", "ttl"},
	{"-A FORWARD -m recent --set -j ACCEPT", "recent"},
	{"-A FORWARD -j NFQUEUE --queue-num 1", "target NFQUEUE"},
	{"-t mangle -A PREROUTING -p tcp -j TPROXY --on-port 99", "target TPROXY"},
	{"-t mangle -A FORWARD -j TTL --ttl-dec 1", "target TTL"},
	{"-t mangle -A FORWARD -j DSCP --set-dscp 7", "target DSCP"},
	{"-t mangle -A FORWARD -j CLASSIFY --set-class 1:1", "target CLASSIFY"},
	{"-t mangle -A FORWARD -p tcp --tcp-flags SYN,RST SYN -j TCPMSS --clamp-mss-to-pmtu", ""},
	{"-t mangle -A PREROUTING -j MARK --set-xmark 0x10000/0x10000", ""},
	{"-A FORWARD -m conntrack --ctstate INVALID -j DROP", ""},
	{"-A FORWARD -p udp -m multiport --dports 53,123 -m comment --comment -m_limit -j REJECT", ""},
	{"-A FORWARD -m limit --limit 5/s -j LOG", ""}, // it logs only
	{"-A INPUT -s 10.0.0.1 -m tos --tos 4 -j DROP", "tos"},
	{"-t nat -A POSTROUTING -s 10.0.0.0/8 -j MASQUERADE", ""},
	{"-A FORWARD -m mark --mark 0x4000/0x4000 -j ACCEPT", ""},
	{"-A FORWARD -m mark ! --mark 0x4000/0x4000 -j DROP", ""},
	{"-A FORWARD -m mark --mark 0x4000 -j ACCEPT", wholeMark},
	{"-A FORWARD -m mark ! --mark 0x10/0x10 -j DROP", wholeMark},
	{"-A FORWARD -m connmark --mark 0x4000 -j ACCEPT", ""},
	{"-t mangle -A FORWARD -j CONNMARK --save-mark", savedMark},
	{"-t mangle -A FORWARD -j CONNMARK --save-mark --nfmask 0x80 --ctmask 0x80", savedMark},
	{"-t mangle -A FORWARD -j CONNMARK --save-mark --nfmask 0x4000 --ctmask 0xffffffff", ""},
	{"-t mangle -A PREROUTING -j CONNMARK --restore-mark", savedMark},
	{"-t mangle -A PREROUTING -j CONNMARK --restore-mark --nfmask 0x4000 --ctmask 0x4080", savedMark},
	{"-t mangle -A PREROUTING -j CONNMARK --restore-mark --nfmask 0x4000 --ctmask 0x4000", ""},
	{"-t mangle -A PREROUTING -j CONNMARK --set-xmark 0x10/0xffffffff", ""},
	{"-t nat -A PREROUTING -j CONNMARK --save-mark", ""},
	{"-t nat -A POSTROUTING -m mark --mark 0x4000 -j RETURN", ""}, // as Flannel's
	// as kube-proxy's
	{"-t nat -A PREROUTING -m statistic --mode nth --every 2 --packet 0 -p tcp -j REDIRECT --to-ports 1", ""},
}

func TestIptables(t *testing.T) {
	for _, program := range []string{"iptables-nft", "iptables-legacy"} {
		for _, c := range iptablesRules {
			t.Run(program+" "+c.rule, func(t *testing.T) {
				ns := namespace(t)
				run(t, ns, program+" -w "+c.rule)
				checkReport(t, read(t, ns), c.why)
			})
		}
	}
}

// checkReport checks that the report has one rule with this reason, or none.
func checkReport(t *testing.T, r Report, why string) {
	t.Helper()
	if why == "" && len(r.Unsafe) > 0 {
		t.Errorf("got %q, want no unsafe rule", r.Unsafe)
	}
	if why != "" && (len(r.Unsafe) != 1 || !strings.HasSuffix(r.Unsafe[0], ": "+why)) {
		t.Errorf("got %q, want one rule with %q", r.Unsafe, why)
	}
}

// The message names table, chain and rule.
func TestNames(t *testing.T) {
	for program, want := range map[string]string{
		"iptables-nft":    "nftables table ip filter, chain guard, rule with handle ",
		"iptables-legacy": "iptables-legacy table filter, chain guard, rule 2: limit",
	} {
		ns := namespace(t)
		for _, line := range []string{
			"-N guard", "-A guard -s 10.0.0.1 -j RETURN", "-A guard -m limit --limit 1/s -j DROP",
			"-A FORWARD -j guard",
		} {
			run(t, ns, program+" -w "+line)
		}
		if r := read(t, ns); len(r.Unsafe) != 1 || !strings.HasPrefix(r.Unsafe[0], want) {
			t.Errorf("%s: got %q, want one rule %q", program, r.Unsafe, want)
		}
	}
}

func TestTracks(t *testing.T) {
	for rule, want := range map[string]bool{
		"-A FORWARD -s 10.0.0.1 -j DROP":                   false,
		"-A FORWARD -m conntrack --ctstate NEW -j ACCEPT":  true,
		"-t nat -A POSTROUTING -s 10.0.0.1 -j MASQUERADE":  true,
		"-t raw -A PREROUTING -s 10.0.0.1 -j CT --notrack": true,
	} {
		for _, program := range []string{"iptables-nft", "iptables-legacy"} {
			ns := namespace(t)
			if read(t, ns).Tracks {
				t.Fatal("an empty namespace tracks connections")
			}
			run(t, ns, program+" -w "+rule)
			if r := read(t, ns); r.Tracks != want {
				t.Errorf("%s %s: tracks %v, want %v", program, rule, r.Tracks, want)
			}
		}
	}
}

// verdict is the last expression of the rules of native nftables in the tests.
var verdict = &expr.Verdict{Kind: expr.VerdictDrop}

var nativeRules = map[string]struct {
	why   string
	exprs []expr.Any
}{
	"limit":     {"limit", []expr.Any{&expr.Limit{Rate: 5, Unit: expr.LimitTimeSecond, Burst: 5}, verdict}},
	"log":       {"", []expr.Any{&expr.Limit{Rate: 5, Unit: expr.LimitTimeSecond, Burst: 5}, &expr.Log{}}},
	"quota":     {"quota", []expr.Any{&expr.Quota{Bytes: 5}, verdict}},
	"connlimit": {"connlimit (ct count)", []expr.Any{&expr.Connlimit{Count: 5}, verdict}},
	"numgen": {"statistic (numgen)", []expr.Any{
		&expr.Numgen{Register: 1, Modulus: 2, Type: unix.NFT_NG_RANDOM},
		&expr.Cmp{Register: 1, Op: expr.CmpOpEq, Data: make([]byte, 4)}, verdict,
	}},
	"random": {"statistic (meta random)", []expr.Any{&expr.Meta{Key: expr.MetaKeyPRANDOM, Register: 1}, verdict}},
	"hour":   {"time (meta time, day or hour)", []expr.Any{&expr.Meta{Key: metaHour, Register: 1}, verdict}},
	"length": {"meta length", []expr.Any{&expr.Meta{Key: expr.MetaKeyLEN, Register: 1}, verdict}},
	"mark": {wholeMark, []expr.Any{
		&expr.Meta{Key: expr.MetaKeyMARK, Register: 1},
		&expr.Cmp{Register: 1, Op: expr.CmpOpEq, Data: make([]byte, 4)}, verdict,
	}},
	"masked mark": {"", []expr.Any{
		&expr.Meta{Key: expr.MetaKeyMARK, Register: 1}, masked(0x4000),
		&expr.Cmp{Register: 1, Op: expr.CmpOpEq, Data: make([]byte, 4)}, verdict,
	}},
	"mask with a bit of the cache": {wholeMark, []expr.Any{
		&expr.Meta{Key: expr.MetaKeyMARK, Register: 1}, masked(0x4010),
		&expr.Cmp{Register: 1, Op: expr.CmpOpEq, Data: make([]byte, 4)}, verdict,
	}},
	"mark in a range": {wholeMark, []expr.Any{
		&expr.Meta{Key: expr.MetaKeyMARK, Register: 1},
		&expr.Range{Op: expr.CmpOpEq, Register: 1, FromData: make([]byte, 4), ToData: []byte{9, 9, 9, 9}}, verdict,
	}},
	// as "meta mark set meta mark or 0x4000"
	"set mark": {"", []expr.Any{
		&expr.Meta{Key: expr.MetaKeyMARK, Register: 1}, masked(^uint32(0x4000)),
		&expr.Meta{Key: expr.MetaKeyMARK, SourceRegister: true, Register: 1}, verdict,
	}},
	"restore mark": {savedMark, []expr.Any{
		&expr.Ct{Key: expr.CtKeyMARK, Register: 1},
		&expr.Meta{Key: expr.MetaKeyMARK, SourceRegister: true, Register: 1},
	}},
	"restore masked mark": {"", []expr.Any{
		&expr.Ct{Key: expr.CtKeyMARK, Register: 1}, masked(0x4000),
		&expr.Meta{Key: expr.MetaKeyMARK, SourceRegister: true, Register: 1},
	}},
	"save mark": {savedMark, []expr.Any{
		&expr.Meta{Key: expr.MetaKeyMARK, Register: 1},
		&expr.Ct{Key: expr.CtKeyMARK, SourceRegister: true, Register: 1}, verdict,
	}},
	"other register": {"", []expr.Any{
		&expr.Meta{Key: expr.MetaKeyMARK, Register: 1}, network(12, 4),
		&expr.Cmp{Register: 1, Op: expr.CmpOpEq, Data: make([]byte, 4)}, verdict,
	}},
	"bytes": {"connbytes (ct bytes)", []expr.Any{
		&expr.Ct{Key: expr.CtKeyBYTES, Register: 1}, &expr.Cmp{Register: 1, Data: make([]byte, 8)}, verdict,
	}},
	"state":            {"", []expr.Any{&expr.Ct{Key: expr.CtKeySTATE, Register: 1}, verdict}},
	"saddr":            {"", []expr.Any{network(12, 4), verdict}},
	"both addresses":   {"", []expr.Any{network(12, 8), verdict}},
	"beyond addresses": {"payload (base 1, offset 12, 12 bytes)", []expr.Any{network(12, 12), verdict}},
	"beyond frame": {"payload (base 0, offset 12, 8 bytes)", []expr.Any{
		&expr.Payload{Base: expr.PayloadBaseLLHeader, Offset: 12, Len: 8, DestRegister: 1}, verdict,
	}},
	"flags of TCP": {"", []expr.Any{
		&expr.Meta{Key: expr.MetaKeyL4PROTO, Register: 1},
		&expr.Cmp{Register: 1, Op: expr.CmpOpEq, Data: []byte{unix.IPPROTO_TCP}}, transport(13, 1), verdict,
	}},
	"flags of no protocol": {"payload (base 2, offset 13, 1 bytes)", []expr.Any{transport(13, 1), verdict}},
	"flags and more": {"payload (base 2, offset 13, 4 bytes)", []expr.Any{
		&expr.Meta{Key: expr.MetaKeyL4PROTO, Register: 1},
		&expr.Cmp{Register: 1, Op: expr.CmpOpEq, Data: []byte{unix.IPPROTO_TCP}}, transport(13, 4), verdict,
	}},
	"tcp timestamps": {"tcp option 8", []expr.Any{
		&expr.Exthdr{Op: expr.ExthdrOpTcpopt, Type: 8, Offset: 2, Len: 4, DestRegister: 1}, verdict,
	}},
	"tcp maxseg": {"", []expr.Any{
		&expr.Exthdr{Op: expr.ExthdrOpTcpopt, Type: maxSegment, Offset: 2, Len: 2, DestRegister: 1}, verdict,
	}},
	"port": {"", []expr.Any{
		&expr.Payload{Base: expr.PayloadBaseTransportHeader, Offset: 2, Len: 2, DestRegister: 1}, verdict,
	}},
	"ttl":  {"payload (base 1, offset 8, 1 bytes)", []expr.Any{network(8, 1), verdict}},
	"dscp": {"payload (base 1, offset 1, 1 bytes)", []expr.Any{network(1, 1), verdict}},
	// The same bytes as the TTL, but the start of an IPv6 address.
	"v6 saddr": {"", []expr.Any{
		&expr.Meta{Key: expr.MetaKeyNFPROTO, Register: 1},
		&expr.Cmp{Register: 1, Op: expr.CmpOpEq, Data: []byte{unix.NFPROTO_IPV6}}, network(8, 1), verdict,
	}},
	"set ttl": {"mangle (payload set)", []expr.Any{
		&expr.Immediate{Register: 1, Data: []byte{7}}, &expr.Payload{
			OperationType: expr.PayloadWrite, Base: expr.PayloadBaseNetworkHeader, Offset: 8, Len: 1, SourceRegister: 1,
		},
	}},
}

func masked(mask uint32) expr.Any {
	return &expr.Bitwise{
		SourceRegister: 1, DestRegister: 1, Len: 4, Mask: binary.NativeEndian.AppendUint32(nil, mask),
		Xor: make([]byte, 4),
	}
}

func transport(offset, size uint32) expr.Any {
	return &expr.Payload{Base: expr.PayloadBaseTransportHeader, Offset: offset, Len: size, DestRegister: 1}
}

func network(offset, size uint32) expr.Any {
	return &expr.Payload{Base: expr.PayloadBaseNetworkHeader, Offset: offset, Len: size, DestRegister: 1}
}

// native adds a rule to a chain "first" of a base chain's table; the base chain is of the given type.
func native(t *testing.T, ns *netns.Namespace, kind nftables.ChainType, through expr.Any, exprs []expr.Any) {
	t.Helper()
	c, err := nftables.New(nftables.WithNetNSFd(ns.FD()))
	must(t, err)
	table := c.AddTable(&nftables.Table{Family: nftables.TableFamilyINet, Name: "t"})
	base := c.AddChain(&nftables.Chain{
		Name: "base", Table: table, Type: kind, Hooknum: nftables.ChainHookPrerouting,
		Priority: nftables.ChainPriorityFilter,
	})
	first := c.AddChain(&nftables.Chain{Name: "first", Table: table})
	if through == nil {
		set := &nftables.Set{
			Table: table, Anonymous: true, Constant: true, IsMap: true,
			KeyType: nftables.TypeInetProto, DataType: nftables.TypeVerdict,
		}
		must(t, c.AddSet(set, []nftables.SetElement{{
			Key: []byte{unix.IPPROTO_UDP}, VerdictData: &expr.Verdict{Kind: expr.VerdictJump, Chain: "first"},
		}}))
		c.AddRule(&nftables.Rule{Table: table, Chain: base, Exprs: []expr.Any{
			&expr.Meta{Key: expr.MetaKeyL4PROTO, Register: 1},
			&expr.Lookup{SourceRegister: 1, IsDestRegSet: true, SetName: set.Name, SetID: set.ID},
		}})
	} else {
		c.AddRule(&nftables.Rule{Table: table, Chain: base, Exprs: []expr.Any{through}})
	}
	c.AddRule(&nftables.Rule{Table: table, Chain: first, Exprs: exprs})
	must(t, c.Flush())
}

var jump = &expr.Verdict{Kind: expr.VerdictJump, Chain: "first"}

func TestNative(t *testing.T) {
	for name, c := range nativeRules {
		t.Run(name, func(t *testing.T) {
			ns := namespace(t)
			native(t, ns, nftables.ChainTypeFilter, jump, c.exprs)
			checkReport(t, read(t, ns), c.why)
		})
	}
}

// Rules for ARP do not concern IP packets.
func TestARP(t *testing.T) {
	ns := namespace(t)
	c, err := nftables.New(nftables.WithNetNSFd(ns.FD()))
	must(t, err)
	table := c.AddTable(&nftables.Table{Family: nftables.TableFamilyARP, Name: "t"})
	chain := c.AddChain(&nftables.Chain{
		Name: "base", Table: table, Type: nftables.ChainTypeFilter, Hooknum: nftables.ChainHookInput,
		Priority: nftables.ChainPriorityFilter,
	})
	c.AddRule(&nftables.Rule{Table: table, Chain: chain, Exprs: nativeRules["limit"].exprs})
	must(t, c.Flush())
	checkReport(t, read(t, ns), "")
}

// Expressions that this kernel does not have.
func TestOtherExpressions(t *testing.T) {
	for name, want := range map[string]string{"queue": "NFQUEUE (queue)", "later": "later"} {
		r := rule{expressions: []expression{{name: name}}}
		if why := r.unsafe(cacheMarks, nil); why != want {
			t.Errorf("%s: got %q, want %q", name, why, want)
		}
	}
}

// Rules are found behind jumps and verdict maps, and are accepted behind chains of type nat.
func TestReached(t *testing.T) {
	unsafe := nativeRules["numgen"]
	for name, through := range map[string]expr.Any{"jump": jump, "verdict map": nil} {
		for kind, why := range map[nftables.ChainType]string{
			nftables.ChainTypeFilter: unsafe.why, nftables.ChainTypeNAT: "",
		} {
			t.Run(name+" "+string(kind), func(t *testing.T) {
				ns := namespace(t)
				native(t, ns, kind, through, unsafe.exprs)
				checkReport(t, read(t, ns), why)
			})
		}
	}
}

// Without the program that shows the rules of iptables-legacy, Read says what to install.
func TestLegacyWithoutProgram(t *testing.T) {
	ns := namespace(t)
	run(t, ns, "iptables-legacy -w -A FORWARD -j ACCEPT")
	t.Setenv("PATH", t.TempDir())
	err := ns.Do(func() error { _, err := Read(t.Context(), cacheMarks); return err })
	if err == nil || !strings.Contains(err.Error(), "install the package iptables") {
		t.Errorf("got error %v, want one that says what to install", err)
	}
}

// Comments look like options, and chains of one table are no targets in another.
func TestParseLegacy(t *testing.T) {
	saved := "*raw\n:cali ACCEPT [0:0]\nCOMMIT\n*filter\n:FORWARD ACCEPT [0:0]\n:own - [0:0]\n" +
		"-A FORWARD -m comment --comment \"a \\\" -m limit -j TTL\" -j DROP\n-A FORWARD -j own\n-A FORWARD -g cali\n"
	want := "iptables-legacy table filter, chain FORWARD, rule 3: target cali"
	if r := parseLegacy("iptables-legacy", saved, cacheMarks); len(r.Unsafe) != 1 || r.Unsafe[0] != want {
		t.Errorf("got %q, want %q", r.Unsafe, want)
	}
}

// A lookup evaluates expressions of the element that it finds. Those that only count are safe.
func TestStateOfElements(t *testing.T) {
	set := chainName{unix.NFPROTO_INET, "t", "s"}
	looksUp := rule{chain: chainName{unix.NFPROTO_INET, "t", "c"}, expressions: []expression{
		{"lookup", attributes{unix.NFTA_LOOKUP_SET: []byte("s\x00")}},
		{"immediate", attributes{unix.NFTA_IMMEDIATE_DREG: {0, 0, 0, unix.NFT_REG_VERDICT}}},
	}}
	for name, why := range map[string]string{
		"limit": "limit (elements of set s)", "quota": "quota (elements of set s)", "counter": "", "last": "",
	} {
		single := nl.NewRtAttr(unix.NFTA_SET_ELEM_EXPR, nil)
		single.AddRtAttr(unix.NFTA_EXPR_NAME, nl.ZeroTerminated(name))
		list := nl.NewRtAttr(elementExpressions, nil)
		list.AddRtAttr(unix.NFTA_LIST_ELEM, nil).AddRtAttr(unix.NFTA_EXPR_NAME, nl.ZeroTerminated(name))
		for form, element := range map[string]*nl.RtAttr{"single": single, "list": list} {
			s := ruleset{maps: map[chainName][]string{}, stateful: map[chainName]string{}}
			must(t, s.element(set, element.Serialize()))
			if got := looksUp.unsafe(cacheMarks, s.stateful); got != why {
				t.Errorf("%s, %s: got %q, want %q", name, form, got, why)
			}
		}
	}
}

// Routing rules may compare marks with a mask that excludes the bits of the cache.
func TestRoutingRules(t *testing.T) {
	for rule, want := range map[string]string{
		"":                                  "",
		"from 10.0.0.1 lookup 99":           "",
		"fwmark 0x4000/0x4000 lookup 99":    "",
		"fwmark 0x4000 lookup 99":           wholeMark,
		"not fwmark 0x10/0x10 lookup 99":    wholeMark,
		"iif lo fwmark 0x0/0x20 lookup 254": wholeMark,
	} {
		for _, family := range []string{"-4", "-6"} {
			if family == "-6" && strings.Contains(rule, "10.0") {
				continue
			}
			ns := namespace(t)
			if rule != "" {
				run(t, ns, "ip "+family+" rule add "+rule)
			}
			checkReport(t, read(t, ns), want)
		}
	}
}
