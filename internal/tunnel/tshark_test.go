package tunnel

import (
	"encoding/binary"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// tshark returns fields of frames, a line a frame.
func tshark(t *testing.T, frames [][]byte, args ...string) []string {
	t.Helper()
	b := binary.NativeEndian.AppendUint32(nil, 0xa1b2c3d4) // pcap, version 2.4, Ethernet
	b = binary.NativeEndian.AppendUint16(b, 2)
	b = binary.NativeEndian.AppendUint16(b, 4)
	for _, v := range []uint32{0, 0, 65535, 1} {
		b = binary.NativeEndian.AppendUint32(b, v)
	}
	for _, f := range frames {
		for _, v := range []int{0, 0, len(f), len(f)} {
			b = binary.NativeEndian.AppendUint32(b, uint32(v))
		}
		b = append(b, f...)
	}
	file := filepath.Join(t.TempDir(), "frames.pcap")
	must(t, os.WriteFile(file, b, 0o644))
	args = append([]string{"-r", file, "-o", "ip.check_checksum:TRUE", "-o", "udp.check_checksum:TRUE",
		"-o", "tcp.check_checksum:TRUE", "-T", "fields", "-E", "separator=|"}, args...)
	out, err := exec.CommandContext(t.Context(), "tshark", args...).Output()
	must(t, err)
	return strings.Split(strings.TrimSuffix(string(out), "\n"), "\n")
}

// TestDecodedByTshark: tshark finds in pushed packets what was asked for, with right checksums and nothing malformed.
func TestDecodedByTshark(t *testing.T) {
	n := newNode(t)
	tcp := innerFrame(inner6, 2, segment)
	nsh := settings{ends: v6, flags: hasGPE | hasNSH | hasCsum, context: context24}
	nshMD1 := settings{ends: v4, flags: hasGPE | hasNSH, md: 1, context: context24[:16], next: nextIP6}
	var frames [][]byte
	var want []string
	for _, c := range []struct {
		settings
		want string
	}{
		{settings{ends: v4}, "eth:ethertype:ip:udp:vxlan:eth:ethertype:ipv6:tcp|0x0800|1193046|0||||||2|2"},
		{settings{ends: v6, flags: hasCsum},
			"eth:ethertype:ipv6:udp:vxlan:eth:ethertype:ipv6:tcp|0x0800|1193046|0||||||2,2|"},
		{settings{ends: v4, flags: hasGroup},
			"eth:ethertype:ip:udp:vxlan:eth:ethertype:ipv6:tcp|0x8800|1193046|43981||||||2|2"},
		{settings{ends: v4, flags: hasGPE, next: nextIP6},
			"eth:ethertype:ip:udp:ipv6:tcp|0x0c|1193046||2|||||2|2"},
		{nsh, "eth:ethertype:ipv6:udp:nsh:eth:ethertype:ipv6:tcp|0x0c|1193046||4|42|255|2|3|2,2|"},
		{nshMD1, "eth:ethertype:ip:udp:nsh:ipv6:tcp|0x0c|1193046||4|42|255|1|2|2|2"},
	} {
		n.set(t, c.settings)
		verdict, out := n.run(t, n.TunPush, tcp)
		if verdict != 0 {
			t.Fatalf("verdict %d, results %v", int32(verdict), n.results(t).Push)
		}
		frames, want = append(frames, out), append(want, c.want)
	}
	fields := []string{"frame.protocols", "vxlan.flags", "vxlan.vni", "vxlan.gbp", "vxlan.next_proto", "nsh.spi",
		"nsh.si", "nsh.mdtype", "nsh.nextproto", "ipv6.tclass.ecn", "ip.dsfield.ecn"}
	var args []string
	for _, f := range fields {
		args = append(args, "-e", f)
	}
	for i, line := range tshark(t, frames, args...) {
		if line != want[i] {
			t.Errorf("frame %d:\n got %s\nwant %s", i, line, want[i])
		}
	}
	bad := "_ws.malformed || ip.checksum.status == 0 || udp.checksum.status == 0 || tcp.checksum.status == 0"
	if found := tshark(t, frames, "-Y", bad, "-e", "frame.number"); found[0] != "" {
		t.Errorf("malformed, or a wrong checksum: frames %v", found)
	}
	// The filter finds a wrong checksum.
	frames[4][14+40+6]++
	if found := tshark(t, frames, "-Y", bad, "-e", "frame.number"); found[0] != "5" {
		t.Errorf("tshark finds frames %v, want 5", found)
	}
}
