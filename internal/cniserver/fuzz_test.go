package cniserver

import (
	"encoding/json"
	"strings"
	"testing"

	types100 "github.com/containernetworking/cni/pkg/types/100"
	"google.golang.org/protobuf/proto"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
)

// FuzzResult: whatever an endpoint says, the runtime is handed a result that it can read, or none.
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
			t.Fatalf("not to be written: %v", err)
		}
		if _, err := types100.NewResult(out); err != nil {
			t.Fatalf("no runtime can read %s: %v", out, err)
		}
		if len(r.IPs) != len(e.Attachments) || strings.Contains(string(out), `"address":"<nil>"`) {
			t.Fatalf("%d attachments became %s", len(e.Attachments), out)
		}
	})
}

// FuzzCall: whatever is posted to /cni, what goes on is a call that can be acted upon.
func FuzzCall(f *testing.F) {
	for _, body := range []string{said("ADD", conf(fileTenant)), said("GC", conf()),
		said("DEL", conf(), "CNI_NETNS=", "CNI_CONTAINERID=a"), said("VERSION", ""), "\x00"} {
		f.Add([]byte(body))
	}
	f.Fuzz(func(t *testing.T, body []byte) {
		c, refused := parseCall(body)
		if refused != nil {
			if refused.Code == 0 || refused.Msg == "" {
				t.Fatalf("refused with %+v", refused)
			}
			return
		}
		var config struct{ Name string }
		if err := json.Unmarshal(c.config, &config); err != nil || config.Name == "" ||
			!strings.HasSuffix(string(body), "\x00\x00"+string(c.config)) {
			t.Fatalf("accepted the configuration %q: %v", c.config, err)
		}
		about := c.verb == "ADD" || c.verb == "DEL" || c.verb == "CHECK"
		if about && (c.containerID == "" || c.name == "" || strings.ContainsAny(c.containerID+c.name, "/\x00 ")) ||
			c.verb != "DEL" && about && c.netns == "" {
			t.Fatalf("accepted %+v", c)
		}
	})
}
