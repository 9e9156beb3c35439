package packet_test

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	"pilaster.io/pilaster/internal/packet"
)

var (
	alice   = netip.MustParseAddr("fd00::a")
	bob     = netip.MustParseAddr("fd00::b")
	macs    = [2]net.HardwareAddr{{2, 0, 0, 0, 0, 1}, {2, 0, 0, 0, 0, 2}}
	samples = []struct {
		name    string
		packet  packet.Packet
		decoder map[string]string // tshark's names of fields, and their values
	}{
		{"udp", packet.Packet{Source: alice, Destination: bob, HopLimit: 3, TrafficClass: 0xb8, FlowLabel: 0x12345,
			Body: packet.UDP{SourcePort: 1000, DestinationPort: 7, Payload: []byte("hello")}},
			map[string]string{
				"udp.srcport":         "1000",
				"udp.dstport":         "7",
				"ipv6.hlim":           "3",
				"ipv6.flow":           "0x012345",
				"udp.checksum.status": "1",
			}},
		{
			"udp empty",
			packet.Packet{
				Source:      alice,
				Destination: bob,
				HopLimit:    64,
				Body:        packet.UDP{SourcePort: 1, DestinationPort: 2, Payload: []byte{}},
			},
			map[string]string{"udp.length": "8", "udp.checksum.status": "1"},
		},
		{"tcp", packet.Packet{Source: alice, Destination: bob, HopLimit: 64,
			Body: packet.TCP{
				SourcePort:      40000,
				DestinationPort: 80,
				Sequence:        7,
				Acknowledgment:  9,
				Flags:           packet.SYN | packet.ACK,
				Window:          512,
				Options:         []byte{2, 4, 5, 0xa0},
				Payload:         []byte("odd"),
			}},
			map[string]string{
				"tcp.flags.syn":       "1",
				"tcp.options.mss_val": "1440",
				"tcp.checksum.status": "1",
				"tcp.len":             "3",
			}},
		{"echo", packet.Packet{Source: alice, Destination: bob, HopLimit: 255,
			Body: packet.ICMP{Type: packet.EchoRequest, Rest: packet.Echo(0x1234, 5), Payload: []byte("ping")}},
			map[string]string{"icmpv6.type": "128", "icmpv6.echo.sequence_number": "5", "icmpv6.checksum.status": "1"}},
		{"extensions", packet.Packet{Source: alice, Destination: bob, HopLimit: 64,
			Extensions: []packet.Extension{
				{Type: packet.HopByHop, Data: []byte{1, 4, 0, 0, 0, 0}},
				{Type: packet.DestinationOptions, Data: []byte{1, 12, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0}},
			},
			Body: packet.UDP{SourcePort: 1, DestinationPort: 2, Payload: []byte{1}}},
			map[string]string{"ipv6.hopopts.nxt": "60", "ipv6.dstopts.nxt": "17", "udp.checksum.status": "1"}},
		{"later fragment", packet.Packet{Source: alice, Destination: bob, HopLimit: 64,
			Extensions: []packet.Extension{packet.Fragment(1448, true, 0xdeadbeef)},
			Body:       packet.Raw{Proto: packet.ProtocolUDP, Data: []byte("01234567")}},
			map[string]string{
				"ipv6.fraghdr.offset": "181",
				"ipv6.fraghdr.more":   "1",
				"ipv6.fraghdr.ident":  "0xdeadbeef",
			}},
		{
			"nothing",
			packet.Packet{
				Source:      alice,
				Destination: bob,
				HopLimit:    64,
				Body:        packet.Raw{Proto: packet.NoNextHeader, Data: []byte{}},
			},
			map[string]string{"ipv6.nxt": "59"},
		},
	}
)

func TestBuiltPacketsDecodeToThemselves(t *testing.T) {
	for _, s := range samples {
		t.Run(s.name, func(t *testing.T) {
			b := s.packet.Marshal()
			got, err := packet.Decode(append(b, "padding"...))
			if err != nil {
				t.Fatal(err)
			}
			if !reflect.DeepEqual(got, s.packet) && fmt.Sprint(got) != fmt.Sprint(s.packet) {
				t.Errorf("got  %+v\nwant %+v", got, s.packet)
			}
			if !packet.ChecksumOK(b) {
				t.Error("checksum is wrong")
			}
		})
	}
}

func TestChecksumOKFindsFlippedBits(t *testing.T) {
	for _, s := range samples[:5] {
		b := s.packet.Marshal()
		for _, at := range []int{8, 39, len(b) - 1} {
			flipped := bytes.Clone(b)
			flipped[at] ^= 0x10
			if packet.ChecksumOK(flipped) {
				t.Errorf("%s: byte %d flipped and not noticed", s.name, at)
			}
		}
	}
}

func TestDecodeRefusesCutPackets(t *testing.T) {
	for _, s := range samples {
		b := s.packet.Marshal()
		for n := 1; n < len(b); n++ {
			if _, err := packet.Decode(b[:n]); !errors.Is(err, packet.ErrTruncated) {
				t.Fatalf("%s cut to %d of %d bytes: %v", s.name, n, len(b), err)
			}
		}
	}
	for name, b := range map[string][]byte{"empty": nil, "IPv4": {0x45, 0}} {
		if _, err := packet.Decode(b); !errors.Is(err, packet.ErrNotIPv6) {
			t.Errorf("%s: %v", name, err)
		}
	}
	arp := packet.Frame(macs[0], macs[1], packet.EtherTypeARP, make([]byte, 28))
	if _, err := packet.DecodeFrame(arp); !errors.Is(err, packet.ErrNotIPv6) {
		t.Errorf("ARP: %v", err)
	}
}

// tshark, an independent implementation, decodes the packets that this package builds.
func TestTsharkAgrees(t *testing.T) {
	tshark, err := exec.LookPath("tshark")
	if err != nil {
		t.Fatal("tshark is missing; make deps installs it")
	}
	for _, s := range samples {
		t.Run(s.name, func(t *testing.T) {
			path := filepath.Join(t.TempDir(), "one.pcap")
			if err := os.WriteFile(path, pcap(s.packet.Frame(macs[0], macs[1])), 0o600); err != nil {
				t.Fatal(err)
			}
			args := []string{"-r", path, "-T", "fields", "-E", "separator=|",
				"-o", "udp.check_checksum:TRUE", "-o", "tcp.check_checksum:TRUE", "-e", "_ws.malformed"}
			want := []string{""}
			for field, value := range s.decoder {
				args, want = append(args, "-e", field), append(want, value)
			}
			out, err := exec.Command(tshark, args...).Output()
			if err != nil {
				t.Fatal(err)
			}
			if got := strings.TrimSuffix(string(out), "\n"); got != strings.Join(want, "|") {
				t.Errorf("tshark says %q, want %q for %q", got, strings.Join(want, "|"), args)
			}
		})
	}
}

func pcap(frame []byte) []byte {
	b := binary.LittleEndian.AppendUint32(nil, 0xa1b2c3d4)
	b = binary.LittleEndian.AppendUint32(b, 4<<16|2) // version 2.4
	b = append(b, make([]byte, 8)...)
	b = binary.LittleEndian.AppendUint32(b, 1<<16)
	b = binary.LittleEndian.AppendUint32(b, 1) // Ethernet
	b = append(b, make([]byte, 8)...)
	b = binary.LittleEndian.AppendUint32(b, uint32(len(frame)))
	b = binary.LittleEndian.AppendUint32(b, uint32(len(frame)))
	return append(b, frame...)
}

// If Decode accepts a packet, building and decoding the result again gives an equal result.
func FuzzDecode(f *testing.F) {
	for _, s := range samples {
		f.Add(s.packet.Marshal())
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		_ = packet.ChecksumOK(b)
		first, err := packet.Decode(b)
		if err != nil || first.HopLimit == 0 {
			return
		}
		second, err := packet.Decode(first.Marshal())
		if err != nil || fmt.Sprintf("%+v", first) != fmt.Sprintf("%+v", second) {
			t.Errorf("%v\nfirst  %+v\nsecond %+v", err, first, second)
		}
	})
}
