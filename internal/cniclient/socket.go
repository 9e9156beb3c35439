package cniclient

import (
	"strings"
	"unicode/utf16"
	"unicode/utf8"
)

// socketKey is the key of the agent's socket in the configuration.
const socketKey = "agentSocket"

// findSocket returns the agent's socket. For an invalid configuration, refused is the error in CNI's format.
func (c *Call) findSocket(config []byte) (socket, refused string) {
	const cannot = "the network configuration cannot be used: "
	socket, other := c.agentSocket(config)
	switch {
	case other != "":
		return "", c.refusal(codeConfig, cannot, `the key "`, other, `" must be written `, socketKey)
	case socket == "":
		return DefaultSocket, ""
	case socket[0] != '/':
		return "", c.refusal(codeConfig, cannot, socketKey, ` "`, socket, `" is not an absolute path`)
	case len(socket) >= len(c.address.Path):
		return "", c.refusal(
			codeConfig,
			cannot,
			socketKey,
			` "`,
			socket,
			`" is longer than the 107 bytes that the path of a socket may have; choose another --run-dir for the `,
			`agent`,
		)
	}
	return socket, ""
}

// agentSocket returns the value of the key socketKey, up to maxText bytes: of the last such key if there are several,
// "" if there is none. other is the key in another letter case, if there is one. The results are meaningful for valid
// JSON only. The agent refuses a configuration that is not JSON.
func (c *Call) agentSocket(config []byte) (socket, other string) {
	depth := 0
	for i := 0; i < len(config); i++ {
		switch config[i] {
		case '{', '[':
			depth++
		case '}', ']':
			depth--
		case '"':
			text, after := stringAt(config, i)
			i = after - 1
			colon := skipSpace(config, after)
			if depth != 1 || colon == len(config) || config[colon] != ':' {
				continue
			}
			if key := unquote(c.key[:0], text); view(key) != socketKey {
				if strings.EqualFold(view(key), socketKey) {
					other = view(add(c.other[:0], view(key)))
				}
				continue
			}
			socket = ""
			i = skipSpace(config, colon+1) - 1 // the loop continues with the value
			if i+1 < len(config) && config[i+1] == '"' {
				text, after := stringAt(config, i+1)
				socket, i = view(unquote(c.socket[:0], text)), after-1
			}
		}
	}
	return socket, other
}

func skipSpace(text []byte, i int) int {
	for i < len(text) && (text[i] == ' ' || text[i] == '\t' || text[i] == '\n' || text[i] == '\r') {
		i++
	}
	return i
}

// stringAt returns the text of the string that begins at i, without its quotes, and the index after it.
func stringAt(text []byte, i int) (inside []byte, after int) {
	for end := i + 1; end < len(text); end++ {
		switch text[end] {
		case '\\':
			end++
		case '"':
			return text[i+1 : end], end + 1
		}
	}
	return nil, len(text)
}

var escapes = [...]byte{'b': '\b', 'f': '\f', 'n': '\n', 'r': '\r', 't': '\t'}

// unquote appends the value of a JSON string to out, while out has room for any character.
func unquote(out, s []byte) []byte {
	for i := 0; i < len(s) && cap(out)-len(out) >= utf8.UTFMax; i++ {
		if s[i] != '\\' || i+1 == len(s) {
			out = add(out, view(s[i:][:1]))
			continue
		}
		i++
		switch c := s[i]; {
		case c == 'u':
			r := hex4(s[i+1:])
			i += 4
			if utf16.IsSurrogate(r) && i+2 < len(s) && s[i+1] == '\\' && s[i+2] == 'u' {
				if both := utf16.DecodeRune(r, hex4(s[i+3:])); both != utf8.RuneError {
					r = both
					i += 6
				}
			}
			out = addRune(out, r)
		case int(c) < len(escapes) && escapes[c] != 0:
			out = add(out, view(escapes[c:][:1]))
		default: // a quote, slash or backslash
			out = add(out, view(s[i:][:1]))
		}
	}
	return out
}

func hex4(s []byte) rune {
	if len(s) < 4 {
		return utf8.RuneError
	}
	var r rune
	for _, c := range s[:4] {
		if c > '9' {
			c += 9
		}
		r = r<<4 | rune(c&15)
	}
	return r
}
