package ovs

import (
	"bytes"
	"encoding/binary"
	"net/netip"
	"strings"
	"testing"

	"github.com/cilium/ebpf"

	"pilaster.io/pilaster/internal/network/nimitz/packettest"
	"pilaster.io/pilaster/internal/network/nimitz/pipeline"
	"pilaster.io/pilaster/internal/packet"
)

// vxlanFrame returns a tunnel packet with the given flag bytes and policy field.
func vxlanFrame(from, to netip.Addr, flags, policy uint16) []byte {
	head := []byte{byte(flags >> 8), byte(flags), byte(policy >> 8), byte(policy), 0, 0, 7, 0}
	p := packet.Packet{
		Source:      from,
		Destination: to,
		Body:        packet.UDP{SourcePort: 5000, DestinationPort: outerUDP, Payload: append(head, "inside"...)},
	}
	return p.Frame(hostMAC, bridgeMAC)
}

// with replaces a byte in the last half of a VTEP's address.
func with(a netip.Addr, at int, v byte) netip.Addr {
	b := a.As16()
	b[at] = v
	return netip.AddrFrom16(b)
}

// TestPolicy: the program moves the identity between address and field and corrects the checksum. Bits that a foreign
// sender sets in its address stay visible.
func TestPolicy(t *testing.T) {
	const mark, netfilters = 0xab001001, 0xe000
	s := &Switch{config: Config{Mark: mark}}
	programs, err := s.loadPolicy()
	must(t, err)
	defer programs.Close()
	here, there := pipeline.VTEP(packettest.Here), pipeline.VTEP(packettest.There)
	carries := func(a netip.Addr) netip.Addr { return with(with(a, identityByte, 0x12), identityByte+1, 0x34) }
	noSum := func(frame []byte) []byte { frame[60], frame[61] = 0, 0; return frame }
	other := packet.Packet{
		Source:      here,
		Destination: carries(there),
		Body:        packet.UDP{SourcePort: 1, DestinationPort: 53, Payload: make([]byte, 20)},
	}.Frame(
		hostMAC,
		bridgeMAC,
	)
	short := packet.Packet{
		Source:      here,
		Destination: carries(there),
		Body:        packet.UDP{SourcePort: 1, DestinationPort: outerUDP},
	}.Frame(
		hostMAC,
		bridgeMAC,
	)
	stranger := netip.AddrFrom16([16]byte{0xfd, 0x70, 0x69, 0x6c, 0x61, 0, 0, 2, 0xff, 0xff, 0, 0, 0x12, 0x34, 0, 2})
	for _, c := range []struct {
		name    string
		program *ebpf.Program
		in, out []byte
		// the mark before and after
		came, mark uint32
	}{
		{"out", programs.PilPolicyOut, vxlanFrame(here, carries(there), 0x0800, 0),
			vxlanFrame(here, there, 0x8800, 0x1234), 0, mark},
		{"out, no identity", programs.PilPolicyOut, vxlanFrame(here, there, 0x0800, 0),
			vxlanFrame(here, there, 0x8800, 0), 0, mark},
		{"out, no checksum", programs.PilPolicyOut, noSum(vxlanFrame(here, carries(there), 0x0800, 0)),
			noSum(vxlanFrame(here, there, 0x8800, 0x1234)), 0, mark},
		{"out, no tunnel", programs.PilPolicyOut, other, other, 0, 0},
		{"in", programs.PilPolicyIn, vxlanFrame(there, here, 0x8800, 0x1234),
			vxlanFrame(carries(there), here, 0x0800, 0), mark, mark},
		{"in, more flags", programs.PilPolicyIn, vxlanFrame(there, here, 0x8848, 0x1234),
			vxlanFrame(carries(there), here, 0x0800, 0), mark, mark},
		{"in, no policy", programs.PilPolicyIn, vxlanFrame(there, here, 0x0800, 0x1234),
			vxlanFrame(there, here, 0x0800, 0), mark, mark},
		{"in, a stranger", programs.PilPolicyIn, vxlanFrame(with(there, identityByte, 9), here, 0x8800, 0x1234),
			vxlanFrame(stranger, here, 0x0800, 0), mark, mark},
		{"in, marked by netfilter too", programs.PilPolicyIn, vxlanFrame(there, here, 0x8800, 0x1234),
			vxlanFrame(carries(there), here, 0x0800, 0), mark | netfilters, mark | netfilters},
		{"in, of a process", programs.PilPolicyIn, vxlanFrame(there, here, 0x8800, 0x1234),
			vxlanFrame(stranger, here, 0x0800, 0), netfilters, netfilters},
		{"in, of a process that has guessed the mark", programs.PilPolicyIn, vxlanFrame(there, here, 0x8800, 0x1234),
			vxlanFrame(stranger, here, 0x0800, 0), mark, mark},
		{"in, no tunnel", programs.PilPolicyIn, other, other, 0, 0},
		{"in, cut short", programs.PilPolicyIn, short, short, mark, mark},
	} {
		var context [192]byte // struct __sk_buff
		binary.NativeEndian.PutUint32(context[8:], c.came)
		if !strings.Contains(c.name, "of a process") {
			binary.NativeEndian.PutUint32(context[36:], 2) // ingress_ifindex
		}
		run := &ebpf.RunOptions{
			Data:       c.in,
			DataOut:    make([]byte, len(c.in)+64),
			Context:    context[:],
			ContextOut: make([]byte, len(context)),
		}
		verdict, err := c.program.Run(run)
		must(t, err)
		if verdict != 0 || !bytes.Equal(run.DataOut, c.out) {
			t.Errorf("%s: %d,\n%x, want\n%x", c.name, verdict, run.DataOut, c.out)
		}
		if mark := binary.NativeEndian.Uint32(run.ContextOut.([]byte)[8:]); mark != c.mark {
			t.Errorf("%s: mark %#x", c.name, mark)
		}
	}
}
