package endpoint

import (
	"fmt"
	"strings"
	"testing"
)

// TestParseHostPort: what operators give, and what runtimes give, as text: how it is kept, or why it is refused.
func TestParseHostPort(t *testing.T) {
	for text, want := range map[string]string{
		"8080:80":                    "8080/TCP to 80",
		"53:5353/udp":                "53/UDP to 5353",
		"1:65535/TCP":                "1/TCP to 65535",
		"[2001:db8::1]:8080:80/tcp":  "[2001:db8::1]:8080/TCP to 80",
		"[::]:8080:80":               "8080/TCP to 80",
		"0:80":                       "host port 0: use 1 to 65535",
		"65536:80":                   "host port 65536: use 1 to 65535",
		"-1:80":                      "host port -1: use 1 to 65535",
		"80:0":                       "host port 80: container port 0: use 1 to 65535",
		"80:65537":                   "host port 80: container port 65537: use 1 to 65535",
		"80:80/sctp":                 `host port 80: protocol "SCTP": host ports are of tcp or udp only`,
		"[::1]:80:80":                "hosts outside reach no loopback address",
		"[fe80::1]:80:80":            "hosts outside reach no such address",
		"[2001:db8::1%eth0]:80:80":   "hosts outside reach no such address",
		"[ff02::1]:80:80":            "hosts outside reach no such address",
		"[x]:80:80":                  `host port 80: "x" is no IP address`,
		"[::ffff:192.0.2.1]:80:80":   "the network is IPv6",
		"80":                         "use HOSTPORT:PORT",
		"":                           "use HOSTPORT:PORT",
		"80:80/":                     "use HOSTPORT:PORT",
		"2001:db8::1:80:80":          "use HOSTPORT:PORT",
		"[2001:db8::1]80:80":         "use HOSTPORT:PORT",
		"8080-8090:80":               "use HOSTPORT:PORT",
		"99999999999999999999999:80": "use HOSTPORT:PORT",
	} {
		p, err := ParseHostPort(text)
		got := p.String()
		if err != nil {
			got = err.Error()
		}
		if err == nil && got != want || err != nil && !strings.Contains(got, want) {
			t.Errorf("%q: got %q, want %q", text, got, want)
		}
	}
	for address, want := range map[string]string{
		"": "80/TCP to 8080", "::": "80/TCP to 8080", "0.0.0.0": "80/TCP to 8080",
		"2001:db8::1": "[2001:db8::1]:80/TCP to 8080",
		"192.0.2.1":   "leave the address out, or use an IPv6 address of this node",
		"127.0.0.1":   "hosts outside reach no loopback address",
		"127.1.2.3":   "hosts outside reach no loopback address",
		"::1":         "hosts outside reach no loopback address",
		"node":        "is no IP address",
	} {
		p, err := NewHostPort(80, 8080, "", address)
		if got := fmt.Sprint(p, err); !strings.Contains(got, want) || (err == nil) == (p.String() != want) {
			t.Errorf("address %q: got %v, %v; want %q", address, p, err, want)
		}
	}
}

// TestCheckHostPorts: one that is listed twice counts once, and those that exclude each other are refused.
func TestCheckHostPorts(t *testing.T) {
	for all, want := range map[string]string{
		"80:80 80:80/udp 81:80":                      "[80/TCP to 80 80/UDP to 80 81/TCP to 80]",
		"80:80 [::]:80:80":                           "[80/TCP to 80]",
		"[2001:db8::1]:80:80 [2001:db8::2]:80:81":    "[[2001:db8::1]:80/TCP to 80 [2001:db8::2]:80/TCP to 81]",
		"80:80 80:81":                                "host ports 80/TCP to 80 and 80/TCP to 81 exclude each other",
		"80:80 [2001:db8::1]:80:80":                  "exclude each other",
		"[2001:db8::1]:80:80/udp 80:80 80:81/udp":    "exclude each other",
		"[2001:db8::1]:80:80 [2001:db8::1]:80:81":    "exclude each other",
		"[2001:db8::1]:80:80/udp [2001:db8::1]:80:8": "[[2001:db8::1]:80/UDP to 80 [2001:db8::1]:80/TCP to 8]",
	} {
		var ports []HostPort
		for text := range strings.FieldsSeq(all) {
			p, err := ParseHostPort(text)
			if err != nil {
				t.Fatal(err)
			}
			ports = append(ports, p)
		}
		distinct, err := CheckHostPorts(ports)
		got := fmt.Sprint(distinct)
		if err != nil {
			got = err.Error()
		}
		if !strings.Contains(got, want) || err == nil && got != want {
			t.Errorf("%s: got %s, want %s", all, got, want)
		}
	}
}

// FuzzParseHostPort: what ParseHostPort accepts is valid, and its record is read as it was written.
func FuzzParseHostPort(f *testing.F) {
	for _, text := range []string{"8080:80", "53:53/udp", "[2001:db8::1]:8080:80/tcp", "[::]:1:1", "0:0", "[]:1:1"} {
		f.Add(text)
	}
	f.Fuzz(func(t *testing.T, text string) {
		p, err := ParseHostPort(text)
		if err != nil {
			return
		}
		if _, err := CheckHostPorts([]HostPort{p}); err != nil {
			t.Errorf("%q: %v", text, err)
		}
		at, of, _ := strings.Cut(p.String(), " to ")
		at, protocol, _ := strings.Cut(at, "/")
		if again, err := ParseHostPort(at + ":" + of + "/" + protocol); err != nil || again != p {
			t.Errorf("%q is %v, and then %v, %v", text, p, again, err)
		}
	})
}
