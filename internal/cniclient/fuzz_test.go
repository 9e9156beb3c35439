package cniclient

import (
	"encoding/json"
	"strings"
	"testing"
	"unicode/utf8"

	"pilaster.io/pilaster/internal/fuzzmutate"
)

// FuzzSocket: for valid JSON, the plugin reads the same socket as encoding/json. For other input, it must not panic.
func FuzzSocket(f *testing.F) {
	const good = `{"name":"pil","agentSocket":"/run/a.sock",` +
		`"args":{"agentSocket":"/nested","list":["agentSocket",{"agentSocket":"/deep"}]}}`
	for _, text := range []string{
		good, `{}`, `null`, `"agentSocket"`, `["agentSocket","/x"]`, `{"agentSocket":null}`,
		`{"agentSocket":5,"agentSocket":"/b"}`,
		`{"agentSocket":["/x"],"x":"\""}`, ` { "x\\" : "\\" , "agent\u0053ocket" : "\/run\/\u0031\n" } `,
		`{"agentSocket":{"agentSocket":"/x"}}`,
		`{"x":"agentSocket","y":"agentSocket:"}`, `{"agentSocket":"/x","agentSocket":"/y"}`, `{"agentSocket":"`,
		`{"agentSocket"`, `{"agentSocket":"\u12`,
	} {
		f.Add([]byte(text), fuzzmutate.Nothing)
	}
	c := new(Call)
	f.Fuzz(func(t *testing.T, text, script []byte) {
		text = fuzzmutate.JSON(text, script, good)
		got, _ := c.agentSocket(text)
		if !utf8.Valid(text) || !json.Valid(text) {
			return
		}
		var keys map[string]json.RawMessage
		var want string
		json.Unmarshal(text, &keys)                // fails if text is not an object
		json.Unmarshal(keys["agentSocket"], &want) // fails if the value is not a string
		if len(want) > maxText-utf8.UTFMax {
			want = want[:min(len(want), len(got))]
		}
		if got != want {
			t.Errorf("%s\ngot socket %q, want %q", text, got, want)
		}
	})
}

// FuzzAnswer: the plugin accepts valid responses only, with their complete body.
func FuzzAnswer(f *testing.F) {
	f.Add("HTTP/1.0 200 OK\r\nContent-Length: 2\r\nPilaster-Exit: 1\r\n\r\n{}")
	f.Add("HTTP/1.1 200 OK\r\nPilaster-Exit: 0\r\n\r\n{}")
	f.Add("HTTP/1.0 404 Not Found\r\n\r\n")
	f.Add("HTTP/1.0\r\n\r\n")
	f.Add("SSH-2.0-x\r\n")
	f.Fuzz(func(t *testing.T, text string) {
		a, why := parseResponse(text)
		if why != "" {
			return
		}
		head, body, whole := strings.Cut(text, "\r\n\r\n")
		if !whole || a.body != body || !strings.HasPrefix(head, "HTTP/1.") || !strings.Contains(head, " "+a.status) {
			t.Fatalf("%q: got response %+v", text, a)
		}
		if a.exit > 255 || a.exit >= 0 && !strings.Contains(head, "\r\nPilaster-Exit: ") {
			t.Fatalf("%q: got exit code %d", text, a.exit)
		}
	})
}

// FuzzRefusal: the plugin prints an error as valid JSON, with the first maxText bytes of its text.
func FuzzRefusal(f *testing.F) {
	f.Add("the agent on /run/\"x\\ does\nnot answer")
	f.Add("\xff\x7f")
	c := new(Call)
	f.Fuzz(func(t *testing.T, text string) {
		var printed struct {
			Code int
			Msg  string
		}
		refused := c.refusal("11", text)
		text = text[:min(len(text), maxText)]
		if err := json.Unmarshal([]byte(refused), &printed); err != nil || printed.Code != 11 ||
			printed.Msg != strings.ToValidUTF8(text, "\ufffd") && utf8.ValidString(text) {
			t.Errorf("%q: got %s, %v", text, refused, err)
		}
	})
}
