package egress_test

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"

	"pilaster.io/pilaster/internal/lab"
	"pilaster.io/pilaster/internal/lab/labtest"
	"pilaster.io/pilaster/internal/packet"
)

// exchange is a packet to a host outside and its answer, with a sentinel in both.
type exchange struct {
	name            string
	request, answer func(sentinel []byte) packet.Body
}

var exchanges = []exchange{
	{"udp", func(s []byte) packet.Body { return packet.UDP{SourcePort: 4001, DestinationPort: 9, Payload: s} },
		func(s []byte) packet.Body { return packet.UDP{SourcePort: 9, Payload: s} }},
	{"tcp", func(s []byte) packet.Body {
		return packet.TCP{SourcePort: 4002, DestinationPort: echoPort, Sequence: 7, Flags: packet.SYN, Window: 9,
			Payload: s}
	}, func(s []byte) packet.Body {
		return packet.TCP{SourcePort: echoPort, Acknowledgment: 8, Flags: packet.SYN | packet.ACK, Window: 9,
			Payload: s}
	}},
	{"icmpv6", func(s []byte) packet.Body {
		return packet.ICMP{Type: packet.EchoRequest, Rest: [4]byte{4, 3, 0, 1}, Payload: s}
	}, func(s []byte) packet.Body {
		return packet.ICMP{Type: packet.EchoReply, Rest: [4]byte{4, 3, 0, 1}, Payload: s}
	}},
}

// judged sends packets with complete checksums both ways. tshark must find the addresses and right checksums on the
// links of the router: on that of n1, where the container is, and on that of the host. onNode is what tshark finds on
// the former: the sources and destinations of all headers. The containers' programs must deliver the answers with the
// addresses that the container knows.
func (b bed) judged(container string, seen netip.Addr, onNode string) {
	b.Helper()
	host := b.address("internet")
	router, err := b.Namespace(lab.Router)
	must(b.T, err)
	defer router.Close()
	var links []*packet.Capture
	for _, device := range []string{"n1", "internet"} {
		c, err := packet.NewCapture(router, device)
		must(b.T, err)
		defer c.Close()
		links = append(links, c)
	}
	inside, err := b.Namespace(container)
	must(b.T, err)
	defer inside.Close()
	arrived, err := packet.NewCapture(inside, lab.Interface, packet.IncomingOnly)
	must(b.T, err)
	defer arrived.Close()
	out, err := packet.NewInjector(inside, lab.Interface)
	must(b.T, err)
	defer out.Close()
	outside, err := b.Namespace("internet")
	must(b.T, err)
	defer outside.Close()
	back, err := packet.NewInjector(outside, lab.Uplink)
	must(b.T, err)
	defer back.Close()
	gateway, err := b.Gateway(container)
	must(b.T, err)
	for _, x := range exchanges {
		sentinel := packet.NewSentinel()
		request := packet.Packet{Source: b.address(container), Destination: host, HopLimit: 64,
			Body: x.request(sentinel[:])}
		must(b.T, out.Send(request.Frame(gateway, out.MAC())))
		var frames [][]byte
		for _, link := range links {
			all, err := link.Until(labtest.Context(b.T), sentinel.In)
			must(b.T, err)
			frames = append(frames, all[len(all)-1].Frame)
		}
		got, err := packet.DecodeFrame(frames[1])
		must(b.T, err)
		want := []string{onNode, fmt.Sprintf("%v>%v", seen, host)}
		b.tshark(x.name, frames, want)

		again := packet.NewSentinel()
		answer := packet.Packet{Source: host, Destination: got.Source, HopLimit: 64, Body: answerTo(got.Body,
			x.answer(again[:]))}
		must(b.T, back.Send(answer.Frame(b.routerMAC("internet"), back.MAC())))
		all, err := arrived.Until(labtest.Context(b.T), again.In)
		must(b.T, err)
		last := all[len(all)-1].Frame
		b.tshark(x.name+" answer", [][]byte{last}, []string{fmt.Sprintf("%v>%v", host, b.address(container))})
		if p, err := packet.DecodeFrame(last); err != nil || !sameFlow(p.Body, request.Body) {
			b.Errorf("%s: the answer is %+v, %v", x.name, p, err)
		}
	}
}

// answerTo gives an answer the ports or the identifier of a request, which a gateway may have changed.
func answerTo(request packet.Body, answer packet.Body) packet.Body {
	switch a := answer.(type) {
	case packet.UDP:
		a.DestinationPort = request.(packet.UDP).SourcePort
		return a
	case packet.TCP:
		a.DestinationPort = request.(packet.TCP).SourcePort
		return a
	case packet.ICMP:
		a.Rest = request.(packet.ICMP).Rest
		return a
	}
	return nil
}

// sameFlow reports whether an answer has the ports or the identifier of the request.
func sameFlow(answer, request packet.Body) bool {
	switch a := answer.(type) {
	case packet.UDP:
		r := request.(packet.UDP)
		return a.DestinationPort == r.SourcePort && a.SourcePort == r.DestinationPort
	case packet.TCP:
		r := request.(packet.TCP)
		return a.DestinationPort == r.SourcePort && a.SourcePort == r.DestinationPort
	case packet.ICMP:
		return a.Rest == request.(packet.ICMP).Rest
	}
	return false
}

// tshark checks the addresses and checksums of frames.
func (b bed) tshark(what string, frames [][]byte, want []string) {
	b.Helper()
	file := filepath.Join(b.TempDir(), "frames.pcap")
	var pcap bytes.Buffer
	for _, word := range []uint32{0xa1b2c3d4, 2 | 4<<16, 0, 0, 1 << 18, 1} { // pcap 2.4, Ethernet
		must(b.T, binary.Write(&pcap, binary.LittleEndian, word))
	}
	for _, f := range frames {
		must(b.T, binary.Write(&pcap, binary.LittleEndian, []uint32{0, 0, uint32(len(f)), uint32(len(f))}))
		pcap.Write(f)
	}
	must(b.T, os.WriteFile(file, pcap.Bytes(), 0o600))
	out, err := exec.Command("tshark", "-n", "-r", file, "-o", "udp.check_checksum:TRUE",
		"-o", "tcp.check_checksum:TRUE", "-T", "fields", "-E", "separator=|",
		"-e", "ipv6.src", "-e", "ipv6.dst", "-e", "udp.checksum.status",
		"-e", "tcp.checksum.status", "-e", "icmpv6.checksum.status").Output()
	must(b.T, err)
	lines := strings.Split(strings.TrimSuffix(string(out), "\n"), "\n")
	if len(lines) != len(want) {
		b.Fatalf("%s: tshark says %q of %d frames", what, out, len(want))
	}
	for i, line := range lines {
		f := strings.Split(line, "|")
		if is := f[0] + ">" + f[1]; is != want[i] {
			b.Errorf("%s: frame %d is %s, want %v", what, i, is, want)
		}
		if status := strings.Join(f[2:], ""); status != "1" {
			b.Errorf("%s: frame %d: status of the checksum is %q, want 1 (good)", what, i, status)
		}
	}
}
