package netns

var Deleted = deleted
