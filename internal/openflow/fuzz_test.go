package openflow

import (
	"bytes"
	"encoding/binary"
	"net/netip"
	"reflect"
	"testing"
)

// flows returns flows with every field and action.
func flows() []Flow {
	a, p := netip.MustParseAddr, netip.MustParsePrefix
	return []Flow{
		{},
		{
			Table:    3,
			Priority: 7,
			Cookie:   1 << 63,
			Match: []Value{
				InPort.Number(9),
				EthType.Number(0x86dd),
				IPv6Src.Address(a("fd00::1")),
				IPv6Dst.Prefix(p("fd00::/9")),
			},
			Goto: 4,
		},
		{
			Match: []Value{
				EthType.Number(0x800),
				IPv4Dst.Prefix(p("10.0.0.0/8")),
				Register(15).Number(5),
				TunnelID.Number(7),
			},
			Actions: []Action{
				Set{IPv4Dst.Address(a("192.0.2.1"))}, Set{EthDst.MAC([]byte{2, 0, 0, 0, 0, 1})}, DecTTL{}, Output(7),
			},
		},
		{
			Match:   []Value{TunnelSrc6.Address(a("fd00::2")).Masked(bytes.Repeat([]byte{0xf0}, 16)), TTL.Number(1)},
			Actions: []Action{Output(LocalPort)},
			Goto:    9,
		},
	}
}

// reply is a message with a flow, as a bridge writes it.
func reply(f Flow) []byte {
	change := Change{Flow: f}.append(nil)
	b := make([]byte, flowStatsLen)
	b[2] = f.Table
	binary.BigEndian.PutUint16(b[12:], f.Priority)
	binary.BigEndian.PutUint64(b[24:], f.Cookie)
	binary.BigEndian.PutUint64(b[32:], f.Packets)
	b = append(b, change[40:]...) // match and instructions
	binary.BigEndian.PutUint16(b, uint16(len(b)))
	return b
}

// TestFlows: flows that are written and read are the same.
func TestFlows(t *testing.T) {
	var all []byte
	for _, f := range flows() {
		all = append(all, reply(f)...)
	}
	got, err := readFlows(all)
	if err != nil || !reflect.DeepEqual(got, flows()) {
		t.Errorf("%v, %v, want %v", got, err, flows())
	}
}

// FuzzReply: the reader rejects an arbitrary reply, or returns flows that are equal after they are written and read
// again.
func FuzzReply(f *testing.F) {
	head := make([]byte, 8)
	head[1] = multipartFlow
	for _, flow := range flows() {
		f.Add(append(bytes.Clone(head), reply(flow)...))
	}
	other := reply(Flow{Actions: []Action{Move{Bits: 24, From: TunnelID, To: Register(0)}, OutputTo{Register(3)}}})
	f.Add(append(bytes.Clone(head), other...))
	f.Fuzz(func(t *testing.T, b []byte) {
		m, err := readMessage(
			bytes.NewReader(
				append(
					binary.BigEndian.AppendUint32(
						[]byte{version, typeMultipartReply, byte((len(b) + 8) >> 8), byte(len(b) + 8)},
						1,
					),
					b...),
			),
		)
		if err != nil {
			return
		}
		flows, _, err := readReply(m)
		if err != nil {
			return
		}
		for _, flow := range flows {
			_ = flow.String()
			again, err := readFlows(reply(flow))
			if err != nil || !reflect.DeepEqual(again, []Flow{flow}) {
				t.Errorf("%v came back as %v, %v", flow, again, err)
			}
		}
	})
}

// TestPrefix: AsPrefix returns the prefix that Prefix wrote, and an invalid prefix for other masks.
func TestPrefix(t *testing.T) {
	for _, text := range []string{"10.0.0.0/1", "10.128.0.0/9", "10.1.1.1/32", "fd00::/8", "fd00::/127",
		"fd00::1/128"} {
		p := netip.MustParsePrefix(text).Masked()
		field := IPv6Dst
		if p.Addr().Is4() {
			field = IPv4Dst
		}
		if got := field.Prefix(p).AsPrefix(); got != p {
			t.Errorf("%v came back as %v", p, got)
		}
	}
	if p := IPv4Dst.Number(10).Masked([]byte{255, 0, 255, 0}).AsPrefix(); p.IsValid() {
		t.Errorf("a mask with a hole is %v", p)
	}
}
