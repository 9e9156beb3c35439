package cni

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/containernetworking/cni/pkg/types"
	types100 "github.com/containernetworking/cni/pkg/types/100"
	"google.golang.org/protobuf/proto"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/spoil"
)

// FuzzAnswer: whatever is behind the agent's socket, the plugin hands on a result that a runtime can
// read, or none.
func FuzzAnswer(f *testing.F) {
	endpoint, err := proto.Marshal(&pilasterv1.Endpoint{
		HostDevice: "pil1", Interface: "eth0", ContainerMac: "02:70:69:6c:00:02", Mtu: 1500,
		Attachments: []*pilasterv1.Attachment{{Address: "fc00::1", Gateway: "fe80::1", Routes: []string{"fc00::/8"}}},
	})
	if err != nil {
		f.Fatal(err)
	}
	f.Add(fmt.Appendf(nil, "HTTP/1.0 200 OK\r\nContent-Length: %d\r\n\r\n%s", len(endpoint), endpoint))
	f.Add(fmt.Appendf(nil, "HTTP/1.0 200 OK\r\nContent-Length: %d\r\n\r\n%s", len(endpoint)+1, endpoint))
	f.Add(fmt.Appendf(nil, "HTTP/1.1 200 OK\r\n\r\n%s", endpoint))
	f.Add([]byte("HTTP/1.0 503 Unavailable\r\n\r\n{\"code\":\"unavailable\"}"))
	f.Add([]byte("HTTP/1.0\r\n"))
	f.Add([]byte("SSH-2.0-x\r\n"))
	f.Fuzz(func(t *testing.T, text []byte) {
		status, body, err := readAnswer(bytes.NewReader(text))
		if err != nil {
			return
		}
		if !bytes.Contains(text, []byte("HTTP/1.")) || !bytes.HasSuffix(text, body) {
			t.Fatalf("status %d with %q was read from %q", status, body, text)
		}
		e := new(pilasterv1.Endpoint)
		if status != 200 || proto.Unmarshal(body, e) != nil {
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

// FuzzRefusal: whatever the agent answers in place of an endpoint, the runtime is told by a code it can act on.
func FuzzRefusal(f *testing.F) {
	const good = `{"code":"unavailable","message":"tenant blue is not known here"}`
	f.Add(503, []byte(good), spoil.Nothing)
	f.Add(404, []byte("no page"), spoil.Nothing)
	f.Add(200, []byte{}, spoil.Nothing)
	f.Add(503, []byte(`{"code":"unavailable"}`), spoil.Nothing)
	codes := map[string]uint{
		"unavailable": 11, "canceled": 11, "deadline_exceeded": 11, "aborted": 11, "not_found": 101, "resource_exhausted": 102, "invalid_argument": 7,
	}
	f.Fuzz(func(t *testing.T, status int, answer, script []byte) {
		answer = spoil.JSON(answer, script, good)
		err := toCNI(agent{"/run/x"}.understand("AddEndpoint", status, answer, new(pilasterv1.AddEndpointResponse)))
		if err == nil {
			if status != 200 {
				t.Fatalf("status %d is taken for a success", status)
			}
			return
		}
		var said struct{ Code, Message string }
		want := uint(types.ErrInternal)
		if status != 200 && json.Unmarshal(answer, &said) == nil && codes[said.Code] != 0 {
			want = codes[said.Code]
		}
		told := new(types.Error)
		if !errors.As(err, &told) || told.Code != want || told.Msg == "" || want != types.ErrInternal && said.Message != "" && told.Msg != said.Message {
			t.Fatalf("status %d with %s became %#v, should have code %d", status, answer, err, want)
		}
	})
}
