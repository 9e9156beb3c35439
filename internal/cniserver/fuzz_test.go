package cniserver

import (
	"encoding/json"
	"strings"
	"testing"

	types100 "github.com/containernetworking/cni/pkg/types/100"
	"google.golang.org/protobuf/proto"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
)

// FuzzResult: for any endpoint, result returns an error, or a result that a runtime can parse.
func FuzzResult(f *testing.F) {
	endpoint, err := proto.Marshal(&pilasterv1.Endpoint{
		HostDevice: "pil1", Interface: "eth0", ContainerMac: "02:70:69:6c:00:02", Mtu: 1500,
		Attachments: []*pilasterv1.Attachment{{Address: "fc00::1", Gateway: "fe80::1", Routes: []string{"fc00::/8"}}},
	})
	if err != nil {
		f.Fatal(err)
	}
	f.Add(endpoint)
	f.Add(endpoint[:len(endpoint)-1])
	f.Fuzz(func(t *testing.T, body []byte) {
		e := new(pilasterv1.Endpoint)
		if proto.Unmarshal(body, e) != nil {
			return
		}
		r, err := result(e, "/run/netns/x")
		if err != nil {
			return
		}
		out, err := json.Marshal(r)
		if err != nil {
			t.Fatalf("the result cannot be encoded: %v", err)
		}
		if _, err := types100.NewResult(out); err != nil {
			t.Fatalf("the result cannot be parsed: %v\n%s", err, out)
		}
		if len(r.IPs) != len(e.Attachments) || strings.Contains(string(out), `"address":"<nil>"`) {
			t.Fatalf("%d attachments: got result %s", len(e.Attachments), out)
		}
	})
}

// FuzzCall: for any request, parseCall returns an error, or a call with all values that its verb needs.
func FuzzCall(f *testing.F) {
	for _, body := range []string{request("ADD", conf(fileTenant)), request("GC", conf()),
		request("DEL", conf(), "CNI_NETNS=", "CNI_CONTAINERID=a"), request("VERSION", ""), "\x00"} {
		f.Add([]byte(body))
	}
	f.Fuzz(func(t *testing.T, body []byte) {
		c, refused := parseCall(body)
		if refused != nil {
			if refused.Code == 0 || refused.Msg == "" {
				t.Fatalf("got error %+v, want a code and a message", refused)
			}
			return
		}
		var config struct{ Name string }
		if err := json.Unmarshal(c.config, &config); err != nil || config.Name == "" ||
			!strings.HasSuffix(string(body), "\x00\x00"+string(c.config)) {
			t.Fatalf("accepted the configuration %q: %v", c.config, err)
		}
		onInterface := c.verb == "ADD" || c.verb == "DEL" || c.verb == "CHECK"
		if onInterface && (c.containerID == "" || c.name == "" ||
			strings.ContainsAny(c.containerID+c.name, "/\x00 ")) ||
			c.verb != "DEL" && onInterface && c.netns == "" {
			t.Fatalf("accepted %+v", c)
		}
	})
}
