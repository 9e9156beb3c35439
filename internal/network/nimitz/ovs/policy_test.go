package ovs

import (
	"bytes"
	"net/netip"
	"testing"

	"github.com/cilium/ebpf"

	"pilaster.io/pilaster/internal/network/nimitz/packettest"
	"pilaster.io/pilaster/internal/network/nimitz/pipeline"
	"pilaster.io/pilaster/internal/packet"
)

// vxlanFrame is a tunnelled packet with the two flag bytes and the policy as given.
func vxlanFrame(from, to netip.Addr, flags, policy uint16) []byte {
	head := []byte{byte(flags >> 8), byte(flags), byte(policy >> 8), byte(policy), 0, 0, 7, 0}
	p := packet.Packet{Source: from, Destination: to, Body: packet.UDP{SourcePort: 5000, DestinationPort: outerUDP, Payload: append(head, "inside"...)}}
	return p.Frame(hostMAC, bridgeMAC)
}

// with is a VTEP's address with something else in its last half.
func with(a netip.Addr, at int, v byte) netip.Addr {
	b := a.As16()
	b[at] = v
	return netip.AddrFrom16(b)
}

// TestPolicy moves the identity between the address and the field, checksum included, and hides nothing that a stranger has in his address.
func TestPolicy(t *testing.T) {
	s := &Switch{config: Config{Mark: 0xabcd01}}
	programs, err := s.loadPolicy()
	must(t, err)
	defer programs.Close()
	here, there := pipeline.VTEP(packettest.Here), pipeline.VTEP(packettest.There)
	carries := func(a netip.Addr) netip.Addr { return with(with(a, identityByte, 0x12), identityByte+1, 0x34) }
	noSum := func(frame []byte) []byte { frame[60], frame[61] = 0, 0; return frame }
	other := packet.Packet{Source: here, Destination: carries(there), Body: packet.UDP{SourcePort: 1, DestinationPort: 53, Payload: make([]byte, 20)}}.Frame(hostMAC, bridgeMAC)
	short := packet.Packet{Source: here, Destination: carries(there), Body: packet.UDP{SourcePort: 1, DestinationPort: outerUDP}}.Frame(hostMAC, bridgeMAC)
	stranger := netip.AddrFrom16([16]byte{0xfd, 0x70, 0x69, 0x6c, 0x61, 0, 0, 2, 0xff, 0xff, 0, 0, 0x12, 0x34, 0, 2})
	for _, c := range []struct {
		name    string
		program *ebpf.Program
		in, out []byte
		mark    uint32
	}{
		{"out", programs.PilPolicyOut, vxlanFrame(here, carries(there), 0x0800, 0), vxlanFrame(here, there, 0x8800, 0x1234), 0xabcd01},
		{"out, no identity", programs.PilPolicyOut, vxlanFrame(here, there, 0x0800, 0), vxlanFrame(here, there, 0x8800, 0), 0xabcd01},
		{"out, no checksum", programs.PilPolicyOut, noSum(vxlanFrame(here, carries(there), 0x0800, 0)), noSum(vxlanFrame(here, there, 0x8800, 0x1234)), 0xabcd01},
		{"out, no tunnel", programs.PilPolicyOut, other, other, 0},
		{"in", programs.PilPolicyIn, vxlanFrame(there, here, 0x8800, 0x1234), vxlanFrame(carries(there), here, 0x0800, 0), 0},
		{"in, more flags", programs.PilPolicyIn, vxlanFrame(there, here, 0x8848, 0x1234), vxlanFrame(carries(there), here, 0x0800, 0), 0},
		{"in, no policy", programs.PilPolicyIn, vxlanFrame(there, here, 0x0800, 0x1234), vxlanFrame(there, here, 0x0800, 0), 0},
		{"in, a stranger", programs.PilPolicyIn, vxlanFrame(with(there, identityByte, 9), here, 0x8800, 0x1234), vxlanFrame(stranger, here, 0x0800, 0), 0},
		{"in, no tunnel", programs.PilPolicyIn, other, other, 0},
		{"in, cut short", programs.PilPolicyIn, short, short, 0},
	} {
		var context [192]byte // struct __sk_buff
		run := &ebpf.RunOptions{Data: c.in, DataOut: make([]byte, len(c.in)+64), Context: context[:], ContextOut: make([]byte, len(context))}
		verdict, err := c.program.Run(run)
		must(t, err)
		if verdict != 0 || !bytes.Equal(run.DataOut, c.out) {
			t.Errorf("%s: %d,\n%x, want\n%x", c.name, verdict, run.DataOut, c.out)
		}
		out := run.ContextOut.([]byte)
		if mark := uint32(out[8]) | uint32(out[9])<<8 | uint32(out[10])<<16 | uint32(out[11])<<24; mark != c.mark {
			t.Errorf("%s: mark %#x", c.name, mark)
		}
	}
}
